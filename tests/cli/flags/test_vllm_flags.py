"""Commands written for `vllm serve`: their flags have the same effect, none, or a reason."""

from __future__ import annotations

import re

import pytest

from cluster.cli.flags.engine_flags import engine_options
from cluster.cli.flags.vllm_flags import flag_notes
from cluster.cli.one_line_parser import command_parser
from cluster.cli.parser import make_parser
from cluster.engine.options.vllm_option_notes import IGNORED, IGNORED_SWITCHES, REJECTED
from cluster.serving.auth.authenticator import Authenticator
from pagedray.errors import AuthenticationError, StartupError

GIVEN = (
    "serve folder --port 8001 --gpu-memory-utilization 0.8 --enable-prefix-caching -tp 2 "
    "--dtype half --kv-cache-dtype fp8 --max-model-len 32K --load-format safetensors "
    "--tool-call-parser hermes --enable-auto-tool-choice --ssl-certfile c --ssl-keyfile k "
    "--disable-log-requests --swap-space 4 --data-parallel-size 1 -pp 1 "
    "--distributed-executor-backend mp --generation-config vllm "
    "--api-key sk-12345678 sk-87654321 --quantization gptq_marlin"
)
AUTOMATIC = "serve folder --dtype auto --max-model-len auto --no-enable-prefix-caching"


def test_names_and_values_are_taken() -> None:
    parsed = make_parser().parse_args(GIVEN.split())
    options = engine_options(parsed)
    assert (options.memory_fraction, options.tensor_parallel_size) == (0.8, 2)
    assert (options.dtype, options.kv_cache_dtype) == ("float16", "fp8_e4m3")
    assert (options.max_model_len, options.load_format) == (32768, "auto")
    assert (options.enable_prefix_cache, options.quantization) == (True, "gptq")
    assert options.executor == "local"
    assert (parsed.http_port, parsed.tool_call_format) == (8001, "hermes")
    assert [str(parsed.tls_cert), str(parsed.tls_key)] == ["c", "k"]
    assert parsed.api_key == ["sk-12345678", "sk-87654321"]


def test_automatic_values_are_the_defaults() -> None:
    options = engine_options(make_parser().parse_args(AUTOMATIC.split()))
    assert (options.dtype, options.max_model_len) == (None, None)
    assert not options.enable_prefix_cache


def test_what_cannot_change_a_token_is_taken() -> None:
    plain = make_parser().parse_args(["serve", "folder"])
    given = (
        "serve --async-scheduling folder --no-async-scheduling --max-logprobs 20 -O3 "
        '--guided-decoding-backend xgrammar --limit-mm-per-prompt {"image":0} '
        "--no-calculate-kv-scales --no-enable-sleep-mode --hf-overrides {} --task auto "
        "--compilation-config {} --stream-interval 4 --language-model-only --device auto"
    )
    assert vars(make_parser().parse_args(given.split())) == vars(plain)


def test_flags_may_have_underscores() -> None:
    given = (
        "serve folder --max_model_len=32K --served_model_name a_b c_d --num_gpu_blocks_override 7"
    )
    parsed = make_parser().parse_args(given.split())
    assert (parsed.max_model_len, parsed.num_blocks) == (32768, 7)
    assert parsed.served_model_name == ["a_b", "c_d"]
    assert make_parser().parse_args(["generate", "folder", "--", "--a_b"]).text == "--a_b"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--quantization int3", "invalid choice: 'int3'"),
        ("--pipeline-parallel-size 2", "use --tensor-parallel-size"),
        ("--runner pooling", "use --task"),
        ("--nnodes 2", "--placement-strategy PACK or SPREAD places ranks on several nodes"),
        ("--return-tokens-as-token-ids", "requests set return_tokens_as_token_ids"),
        ("--enable-lora", "merge the adapter into the weights"),
        ("--revision main", "write the revision after the model: ORG/NAME@REVISION"),
        (
            "--max-modl-len 32K",
            "unrecognized arguments: --max-modl-len 32K; did you mean --max-model-len?",
        ),
        ("--frobnicate", "unrecognized arguments: --frobnicate (see pagedray serve --help)"),
        ("--model m", "the model is the first argument"),
        ("-dp 2", "use num_replicas of Ray Serve"),
        ("--seed 1", "requests set their own seed"),
        ("--max-model-len many", "such as 32768, 32K or auto, not 'many'"),
        (
            "--max-num 3",
            "--max-num 3; did you mean --max-num-seqs or --max-num-batched-tokens?",
        ),
        ("--conf x.yaml", "unrecognized arguments: --conf x.yaml; did you mean --config?"),
        ("--max-logprobs 21", "at most 20 log-probabilities"),
        ("--calculate-kv-scales", "scales of keys and values are read from the checkpoint"),
        ("--guided-decoding-backend outlines", "structures are always compiled by xgrammar"),
        ('--limit-mm-per-prompt {"image":4}', "requests with images, audio or video are rejected"),
        ("--no-enable-chunked-prefill", "long prompts are always computed in chunks"),
        ("--enable-sleep-mode m", "weights stay in memory"),
        ("--hf-overrides " + 10_000 * "[", "edit config.json in the folder of the model"),
        ("--dtype int4", "invalid choice: 'int4' (choose from "),
    ],
)
def test_others_are_rejected_in_one_line(
    flags: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        make_parser().parse_args(["serve", "folder", *flags.split()])
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_every_noted_flag_exists() -> None:
    parser = command_parser(make_parser(), "serve")
    notes = dict(flag_notes(parser))
    for flag, note in notes.items():
        for name in (flag, *re.findall(r"same as `(.+)`", note)):
            assert name in parser._option_string_actions, name
    assert notes["--gpu-memory-utilization"] == "the same as `--memory-fraction`"
    assert notes["--enable-prefix-caching"].startswith("no effect: ")
    assert notes["--runner"] == "rejected, except for `auto`: use `--task`"


def test_a_typing_error_behind_two_commands_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        make_parser().parse_args(["bench", "serve", "--num-promts", "3"])
    assert "pagedray bench serve: error: " in (error := capsys.readouterr().err)
    assert "did you mean --num-prompts?" in error


def test_keys_are_those_of_one_tenant() -> None:
    authenticator = Authenticator(keys=["sk-12345678"])
    assert authenticator.authenticate("Bearer sk-12345678").is_admin
    for wrong in (None, "Bearer sk-12345679"):
        with pytest.raises(AuthenticationError):
            authenticator.authenticate(wrong)
    authenticator.reload_if_changed()
    assert authenticator.requires_keys


@pytest.mark.parametrize("key", ["", "short", "x" * 257, "with\nnewline", "\u00e9" * 9])
def test_bad_keys_are_rejected(key: str) -> None:
    with pytest.raises(StartupError, match="--api-key must be"):
        Authenticator(keys=[key])


def test_notes_are_whole_clauses() -> None:
    notes = [*IGNORED_SWITCHES.values(), *IGNORED.values(), *REJECTED.values()]
    assert not [note for note in notes if re.fullmatch(r"[^ ].*[^ .,;]", note) is None]
