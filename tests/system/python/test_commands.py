"""Commands such as `pagedray chat`, and programs that end without closing the engine."""

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.cli.commands import main
from pagedray import SamplingParams
from tests.cli.terminal_emulator import Terminal
from tests.fakes import wait_for
from tests.system.engines import open_llm
from tests.system.server_process import TINY_LLAMA

FLAGS = ("--dtype=float32", "--max-tokens=8", "--temperature=0")
SYSTEM = {"role": "system", "content": "Answer in one word."}
QUESTION = {"role": "user", "content": "What does open do?"}


def _answers(*messages: list[dict[str, str]]) -> list[str]:
    with open_llm() as llm:
        results = llm.chat(
            list(messages), SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False
        )
        return [result.outputs[0].text for result in results]


def test_output_has_only_the_answers_to_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, with_system = _answers([QUESTION], [SYSTEM, QUESTION])
    assert plain != with_system
    for flags, answer in (((), plain), (("--system-prompt", SYSTEM["content"]), with_system)):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION['content']}\n"))
        assert main(["chat", str(TINY_LLAMA), *FLAGS, *flags]) == 0
        printed = capsys.readouterr()
        assert printed.out == f"{answer}\n"
        assert re.search(r"\[8 tokens, [\d.]+ tokens/s, first after \d+ ms, cut at", printed.err)


def test_input_that_is_closed_or_not_text_ends_without_a_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["chat", str(TINY_LLAMA), *FLAGS]) == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert main(["chat", str(TINY_LLAMA), *FLAGS]) == 2
    assert capsys.readouterr().err.endswith("pagedray: error: The message is not UTF-8.\n")


def test_ctrl_c_stops_an_answer_and_keeps_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY_LLAMA, folder)
    # Answers do not end before their maximum length.
    for path in folder.glob("*config.json"):
        settings = json.loads(path.read_text())
        for name in {"eos_token_id", "eos_token"} & set(settings):
            del settings[name]
        # So long an answer is stopped in time even on a busy machine.
        if "max_position_embeddings" in settings:
            settings["max_position_embeddings"] = 2**16
        path.write_text(json.dumps(settings))
    flags = ("--dtype=float32", "--executor=local", "--max-tokens=60000", "--temperature=1")
    with Terminal(["chat", str(folder), *flags]) as terminal:
        wait_for(lambda: "/help lists commands" in terminal.text, 120.0)
        for number in (1, 2):
            size = len(terminal.written)
            terminal.press(b"What does open do?\r")
            # More than the message, which appears twice if it was typed before the prompt was read.
            wait_for(lambda: len(terminal.written) > size + 150)  # noqa: B023
            terminal.press(b"\x03")
            wait_for(lambda: terminal.written.count(b"Stopped after ") == number)  # noqa: B023
        # A terminal may lose what is typed before the prompt is read.
        wait_for(lambda: terminal.written.endswith(b"> "))
        terminal.press(b"\x04")
        assert terminal.process.wait(60.0) == 0


def test_a_model_without_chat_template_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY_LLAMA, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))
    assert main(["chat", str(folder), *FLAGS]) == 2
    assert "no chat template; use `pagedray generate`" in capsys.readouterr().err


COMMAND = ("generate", str(TINY_LLAMA), "class Queue:", "--dtype=float32", "--seed=1", "--json")


def test_unset_parameters_are_those_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(*flags: str) -> str:
        assert main([*COMMAND, "--max-tokens=8", *flags]) == 0
        return str(json.loads(capsys.readouterr().out)["text"])

    (tmp_path / "generation_config.json").write_text('{"temperature": 1.5}')
    file = f"--generation-config={tmp_path}"
    greedy = text()
    assert text(file) == text("--temperature=1.5") != greedy
    assert text(file, "--temperature=0") == greedy


def test_values_are_checked_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND[:1], "absent", "a", "--temperature=-1"]) == 2
    assert "temperature" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [COMMAND[:3], ("chat", COMMAND[1]), ("bench", "latency", COMMAND[1])]
)
def test_a_model_that_embeds_is_rejected_before_it_is_loaded(
    command: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--task=embed", "--device=cpu"]) == 2
    message = "The task of tiny-llama is embed, but this command generates text; use "
    assert capsys.readouterr().err.startswith(f"pagedray: error: {message}")


EXIT_CLOSE = """
import atexit, os, sys
from cluster.llm.options import ExitClose
atexit.register(print, "earlier handler")
exit_close = ExitClose(lambda: print("closed"))
"""
OFFLINE = f"""
import ray
from pagedray import LLM, SamplingParams
llm = LLM("{TINY_LLAMA}", device="cpu", tensor_parallel_size=2, show_progress=False)
ray.init = lambda *given, **named: print("Ray is started again.")
print(len(llm.generate("x", SamplingParams(max_tokens=3), use_tqdm=False)))
"""


def run(program: str) -> str:
    """Return what a program writes."""
    found = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300.0,
        check=True,
    )
    return found.stdout


def test_the_engine_is_closed_before_earlier_handlers_run() -> None:
    assert run(EXIT_CLOSE) == "closed\nearlier handler\n"


def test_an_engine_that_was_closed_is_not_closed_again() -> None:
    assert run(f"{EXIT_CLOSE}\nexit_close.cancel()\nexit_close.cancel()") == "earlier handler\n"


def test_a_fork_does_not_close_the_engine_of_its_parent() -> None:
    program = f"{EXIT_CLOSE}\nif os.fork():\n    os.wait()\n    exit_close.cancel()\n"
    assert run(program) == "earlier handler\n" * 2


@pytest.mark.slow
def test_ray_is_not_started_again_at_the_exit() -> None:
    assert run(OFFLINE) == "1\n"
