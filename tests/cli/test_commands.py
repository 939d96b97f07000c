"""The flags of the command line, and the imports of --help."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attention.selector import BACKEND_NAMES
from cluster.cli.client_flags import sampling_fields
from cluster.cli.commands import main, set_ports
from cluster.cli.engine_flags import engine_options
from cluster.cli.parser import make_parser
from cluster.engine.engine_options import EngineOptions
from cluster.engine.progress import ProgressLine
from cluster.llm.llm import LLM
from cluster.serving.auth import Authenticator
from pagedray.errors import CheckpointError, DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator

TINY_LLAMA = Path(__file__).parents[2] / "examples" / "tiny-llama"
# The last may be "(default: ...)".
SENTENCES = re.compile(r"\S.*[.)]", re.DOTALL)
HEAVY = ("fastapi", "grpc", "numpy", "ray", "torch", "transformers")


def parsed(*arguments: str) -> argparse.Namespace:
    return make_parser().parse_args(arguments)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


def texts_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield what `--help` says about a command, its flags and its commands."""
    yield parser.description or ""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from (command.help or "" for command in action._choices_actions)
        elif not isinstance(action, argparse._HelpAction | argparse._VersionAction):
            yield action.help or ""


def test_help_consists_of_whole_sentences() -> None:
    texts = {text for parser in parsers(make_parser()) for text in texts_of(parser)}
    texts -= {"", argparse.SUPPRESS}
    assert len(texts) > 100
    assert not [text for text in texts if SENTENCES.fullmatch(text) is None]


def test_help_loads_nothing_heavy() -> None:
    for code, out, loaded, _ in _run_all(
        [["--help"], ["serve", "--help"], ["generate", "--help"], ["chat", "--help"]]
    ):
        assert (code, loaded) == (0, [])
        assert "usage" in out.lower()


def test_mistakes_are_found_before_the_server_is_imported(tmp_path: Path) -> None:
    for folder in ("empty", "bad"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bad" / "config.json").write_text("{")
    mistakes = {
        "HTTP port must be from 0 to 65535, not 99999.": ["--port=99999"],
        "gRPC port must be from 0 to 65535, not -1.": ["--grpc-port=-1"],
        "Cannot bind gRPC to no.such.invalid:": ["--host=no.such.invalid"],
        "max_model_len 1000000 is more than the 1024 positions": ["--max-model-len=1000000"],
        "dtype float16 is not supported on the CPU": ["--dtype=float16", "--device=cpu"],
        "block_size must be from 1 to 256, not 1000.": ["--block-size=1000"],
        "quantization": ["--quantization=awq"],
        "The local executor runs one rank": ["-tp=2", "--executor=local"],
    }
    models = {"absent": "is not a folder", "empty": "No config.json found in", "bad": "config.json"}
    cases = [
        *((["serve", str(TINY_LLAMA), *flags], message) for message, flags in mistakes.items()),
        *((["serve", str(tmp_path / name)], message) for name, message in models.items()),
    ]
    outcomes = _run_all(
        [[*arguments[:2], "--http-port=0", *arguments[2:]] for arguments, _ in cases]
    )
    for (_, message), (code, out, loaded, error) in zip(cases, outcomes, strict=True):
        assert message in error
        assert (code, out, loaded) == (2, "", [])


def _run_all(commands: list[list[str]]) -> list[tuple[int, str, list[str], str]]:
    """Run commands in one process that has imported nothing else.

    Returns the code, the output, the heavy modules that are loaded and the errors of each.
    """
    script = (
        "import contextlib, io, json, sys\nfrom cluster.cli.commands import main\n"
        f"for command in {commands!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out, "
        "contextlib.redirect_stderr(io.StringIO()) as error:\n"
        "        try:\n            code = main(command)\n"
        "        except SystemExit as ended:\n            code = ended.code\n"
        f"    loaded = [m for m in {(*HEAVY, 'cluster.cli.server')!r} if m in sys.modules]\n"
        "    print(json.dumps([code, out.getvalue(), loaded, error.getvalue()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120.0, check=False
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_all_ports_in_use_are_named_at_once() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
    ):
        ports = (first.getsockname()[1], second.getsockname()[1])
        flags = [f"--grpc-port={ports[0]}", f"--http-port={ports[1]}"]
        ((code, out, loaded, error),) = _run_all([["serve", str(TINY_LLAMA), *flags]])
    assert (code, out, loaded) == (2, "", [])
    assert (
        f"gRPC port {ports[0]} and HTTP port {ports[1]} of 127.0.0.1 are already in use; "
        "choose others with --grpc-port and --http-port."
    ) in error


@pytest.mark.parametrize(
    ("flags", "is_moved"),
    [([], False), (["--port=8001"], True), (["--http-port=0"], True), (["--port=8000"], False)],
)
def test_a_second_server_only_needs_another_http_port(
    flags: list[str], *, is_moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        monkeypatch.setattr("cluster.cli.commands.DEFAULT_GRPC_PORT", port)
        given = parsed("serve", "m", *flags)
        assert given.grpc_port is None
        if is_moved:
            given.http_port = 0
            set_ports(given)
            assert given.grpc_port > port
        else:
            with pytest.raises(DeviceError, match=f"gRPC port {port} .* in use"):
                set_ports(given)


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("cluster.cli.commands", []),
        ("cluster.cli.config_file", ["--config", "missing"]),
        ("cluster.cli.server", []),
    ],
)
def test_interrupt_at_the_start_ends_silently(module: str, flags: list[str]) -> None:
    script = (
        # Tests that run in the background of a script ignore SIGINT, and so do their children.
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from cluster.cli.__main__ import main\n"
        f"sys.argv[1:] = {['serve', str(TINY_LLAMA), '--port=0', *flags]!r}\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("is_flushed", [False, True])
def test_output_that_nothing_reads_ends_a_command_without_a_trace(*, is_flushed: bool) -> None:
    script = "import sys\nfrom cluster.cli.commands import main\n"
    if is_flushed:
        script += "sys.stdout.reconfigure(line_buffering=True)\n"
    script += "sys.exit(main(['keys', 'new', '--tenant', 'ann']))"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("flags", [["keys", "new", "--tenant=a"], ["simulate", "--num-prompts=1"]])
def test_output_to_a_full_disk_ends_a_command_with_one_line(flags: list[str]) -> None:
    script = f"import sys\nfrom cluster.cli.commands import main\nsys.exit(main({flags!r}))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True
        )
    error = "pagedray: error: Cannot write: No space left on device.\n"
    assert (done.returncode, done.stderr) == (1, error)


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_flags_left_out_mean_the_defaults(command: str) -> None:
    text = ["x"] if command == "generate" else []
    options = engine_options(parsed(command, "folder", *text))
    expected = EngineOptions() if command == "serve" else EngineOptions(executor="local")
    assert options == expected


def test_help_states_a_default_once() -> None:
    helps = [one.format_help() for one in parsers(make_parser())]
    assert [text for text in helps if re.search(r"\(default: [^)]*\)\s+\(default:", text)] == []


def test_every_option_has_a_flag() -> None:
    help_text = _parser_of("serve").format_help()
    # What is on by default has a flag that turns it off.
    names = [
        field.name.replace("_", "-").replace(
            "enable-", "no-" if field.default is True else "enable-"
        )
        for field in fields(EngineOptions)
        # They must be those of the model, so they choose nothing.
        if not field.name.startswith("tokenizer")
    ]
    assert [name for name in names if f"--{name}" not in help_text] == []


def _parser_of(command: str) -> argparse.ArgumentParser:
    (commands,) = (a for a in make_parser()._actions if a.dest == "command" or a.choices)
    assert isinstance(commands.choices, dict)
    found: argparse.ArgumentParser = commands.choices[command]
    return found


def test_help_of_serve_has_the_groups_of_the_document() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    table = text.partition("## Options by purpose")[2]
    named = [
        name for name in re.findall(r"^\| ([^|]*?) ?\| .+ \| .+ \|$", table, re.MULTILINE) if name
    ]
    groups = [group.title for group in _parser_of("serve")._action_groups[2:]]
    assert named[0] == "group"
    assert named[2:] == groups


def test_help_of_serve_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = _parser_of("serve").format_help().splitlines()
    assert len(lines) <= 170
    # Names of vLLM and lists of values are not repeated.
    assert not [line for line in lines if line.count("{") > 1 and "rope" not in line]
    assert not [line for line in lines if "--gpu-memory-utilization" in line]


def test_help_names_every_attention_backend() -> None:
    help_text = " ".join(_parser_of("serve").format_help().split())
    found = re.search(r"Attention backend: ([a-z_, ]+);", help_text)
    assert found is not None
    assert sorted(re.split(r", | or ", found[1])) == sorted(BACKEND_NAMES)


def test_flags_are_read() -> None:
    options = engine_options(
        parsed(
            "serve",
            "folder",
            "--tensor-parallel-size=2",
            "--no-prefix-cache",
            "--memory-fraction=0.5",
            "--preemption=swap",
            "--load-seed=7",
            "--enforce-eager",
            "--enable-expert-parallel",
            "--max-graph-tokens=0",
        )
    )
    assert (options.tensor_parallel_size, options.enable_prefix_cache) == (2, False)
    assert (options.memory_fraction, options.preemption) == (0.5, "swap")
    assert (options.load_seed, options.enforce_eager) == (7, True)
    assert options.max_graph_tokens == 0
    assert options.enable_expert_parallel


def test_serve_accepts_a_tool_call_format() -> None:
    assert parsed("serve", "m", "--tool-call-format=llama3_json").tool_call_format == "llama3_json"
    assert parsed("serve", "m").tool_call_format is None


def test_serve_accepts_a_reasoning_format_by_both_names() -> None:
    for flag in ("--reasoning-format", "--reasoning-parser"):
        assert parsed("serve", "m", f"{flag}=deepseek_r1").reasoning_format == "deepseek_r1"
    assert parsed("serve", "m").reasoning_format is None


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("serve", "ray"),
        ("generate", "local for a single rank, otherwise ray"),
        ("chat", "local for a single rank, otherwise ray"),
    ],
)
def test_help_names_the_default_executor(command: str, default: str) -> None:
    help_text = " ".join(_parser_of(command).format_help().split())
    assert f"local runs a single rank in this process. (default: {default})" in help_text


def test_more_than_one_rank_uses_ray_by_default() -> None:
    assert engine_options(parsed("chat", "m", "--tensor-parallel-size=2")).executor == "ray"
    given = parsed("chat", "m", "--tensor-parallel-size=2", "--executor=local")
    assert engine_options(given).executor == "local"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_seed_is_passed_to_sampling_fields(command: str) -> None:
    text = ["x"] if command == "generate" else []
    given = parsed(command, "folder", *text, "--seed=5")
    assert sampling_fields(given)["seed"] == 5
    assert engine_options(given).load_seed == 0
    assert sampling_fields(parsed(command, "folder", *text)).keys() == {"max_tokens"}


def test_seed_of_a_server_is_that_of_its_engine() -> None:
    assert engine_options(parsed("serve", "folder", "--seed=5")).seed == 5
    assert engine_options(parsed("serve", "folder")).seed is None


def test_progress_is_silent_once_it_is_closed() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream)
    line.report("Loading weights", 0.5)
    line.close()
    line.report("Loading weights again", 0.5)
    assert stream.getvalue() == "Loading weights ...\n"


def test_progress_shows_a_speed_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    line = ProgressLine(stream)
    line.report("Downloading a/b", 0.0)
    line.report("Downloading a/b; 5.0 MB/s", 0.1)
    monkeypatch.setattr("cluster.engine.progress._LINE_PAUSE_S", 0.0)
    line.report("Downloading a/b; 6.0 MB/s", 0.2)
    line.report("Downloading a/b", 0.3)
    line.report("Loading weights", 0.5)
    shown = "Downloading a/b ...\nDownloading a/b ... 20%, 6.0 MB/s\nLoading weights ...\n"
    assert stream.getvalue() == shown


def test_trust_remote_code_has_no_effect_but_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    text = "has no effect: code from checkpoints is never run."
    folder = str(tmp_path / "none")
    for words in (["serve", folder, "--port", "0"], ["generate", folder, "text"], ["chat", folder]):
        assert main([*words, "--trust-remote-code"]) == 2
        assert f"--trust-remote-code {text}" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="is not a folder"):
        LLM(folder, trust_remote_code=True)
    assert caplog.messages[-1] == f"trust_remote_code {text}"
    assert caplog.records[-1].levelname == "WARNING"


def test_a_new_key_is_accepted_with_its_printed_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", "--tenant=research.a-1"]) == 0
    out = capsys.readouterr().out
    (key,) = re.findall(r"^    (\S+)$", out, re.MULTILINE)
    lines = out[out.index("[tenants.") :]
    assert key not in lines
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text(lines)
    assert Authenticator(path).authenticate(f"Bearer {key}").name == "research.a-1"


@pytest.mark.parametrize("tenant", ["", 'a"b', "a\nb", "x" * 65])
def test_an_invalid_tenant_name_is_rejected(
    tenant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", f"--tenant={tenant}"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert "tenant" in shown.err


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_flags(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("serve", "bench", "--max-model-len", "--tool-call-format"):
        assert word in script
    # Flags of vLLM that are hidden from the help are hidden here too.
    assert "--pipeline-parallel-size" not in script


def test_bash_completes_paths_and_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "more.yaml").touch()
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    for line, expected in (
        ("serve mo", "models"),
        ("serve models --max-mo", "--max-model-len"),
        ("serve --config mo", "models more.yaml"),
        ("bench serve --backend grpc-", "grpc-chat"),
        ("chat models --generation-config m", "models"),
    ):
        program = (
            f"source {script}; COMP_WORDS=(pagedray {line});"
            "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _shtab_pagedray; echo ${COMPREPLY[@]}"
        )
        done = subprocess.run(
            ["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == expected.split(), line
