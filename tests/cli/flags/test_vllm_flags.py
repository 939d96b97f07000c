"""Commands written for `vllm serve`: their flags have the same effect, none, or a reason."""

from __future__ import annotations

import argparse
import re
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.cli.commands import main
from cluster.cli.engine_flags import engine_options, flag_notes, ignored_flags
from cluster.cli.flag import read_object
from cluster.cli.parser import OneLineParser, command_parser, make_parser
from cluster.engine.engine_options import EngineOptions
from cluster.engine.vllm_options import IGNORED, IGNORED_SWITCHES, REJECTED
from cluster.serving.auth import Authenticator
from pagedray.errors import AuthenticationError, StartupError

PARSER = make_parser()
SERVE = command_parser(PARSER, "serve")
FLAGS = (Path(__file__).parent / "vllm_flags.txt").read_text().split()
"""The flags of vLLM 0.33, without `--no-` forms and fields of objects."""
PLAUSIBLE = {
    "--attention-backend": "FLASH_ATTN",
    "--convert": "embed",
    "--distributed-executor-backend": "mp",
    "--dtype": "bfloat16",
    "--generation-config": "auto",
    "--hf-overrides": "{}",
    "--kv-cache-dtype": "fp8",
    "--load-format": "auto",
    "--log-level": "info",
    "--mamba-ssm-cache-dtype": "float32",
    "--model": "folder",
    "--override-generation-config": "{}",
    "--pooler-config": "{}",
    "--quantization": "fp8",
    "--reasoning-parser": "qwen3",
    "--runner": "pooling",
    "--speculative-config": "{}",
}
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
    assert options.executor == "ray"
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
        "--no-calculate-kv-scales --no-enable-sleep-mode --task auto "
        "--compilation-config {} --stream-interval 4 --language-model-only --device auto "
        "-cc.mode=3 --compilation_config.pass_config.fuse_norm_quant true -ac.backend FLASH_ATTN "
        "--structured-outputs-config.backend xgrammar --kv-cache-dtype-skip-layers"
    )
    parsed = vars(make_parser().parse_args(given.split()))
    lines = parsed.pop("ignored_flags")
    assert parsed == vars(plain)
    assert lines["async_scheduling"] == (
        "--no-async-scheduling has no effect: a step is always planned while the previous one runs."
    )
    assert lines["optimization_level"] == (
        "--optimization-level has no effect: --enforce-eager and --max-graph-tokens control what "
        "runs as CUDA graphs."
    )
    assert lines.keys() == {
        "async_scheduling",
        "attention_config",
        "compilation_config",
        "language_model_only",
        "limit_mm_per_prompt",
        "optimization_level",
        "stream_interval",
    }


def outcome(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return `done`, the line of a flag without effect, or the error of a rejected flag."""
    parsed = argparse.Namespace()
    with suppress(SystemExit):
        parsed = PARSER.parse_args(["serve", "folder", *words])
    return capsys.readouterr().err or " ".join(ignored_flags(parsed).values()) or "done"


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag != "--config"])
def test_every_flag_of_vllm_is_known(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = flag[2:].replace("-", "_")
    value = PLAUSIBLE.get(flag, "1")
    forms = [[flag, value], [f"--{name}={value}"]]
    if SERVE._option_string_actions[flag].nargs == 0:
        forms = [[flag], [f"--{name}"]]
        if flag not in ("--help", "--version"):
            forms.append([f"--no-{flag[2:]}"])
    if flag.endswith("-config") and flag != "--generation-config":
        forms += [[f"{flag}.key", "value"], [f"--{name}.a.b=1"], [flag, '{"key": [1]}']]
    for words in forms:
        found = outcome(words, capsys)
        assert found.count("\n") <= 1
        assert found == "done" or re.search(r" (has no effect|is not supported): \S.{9}", found)


@pytest.mark.parametrize(
    ("words", "model", "others"),
    [
        ("serve --model m", "m", {}),
        ("serve --port 1 --model=m --host h", "m", {"host": "h", "http_port": 1}),
        ("serve m --model m", "m", {}),
        ("serve --served-model-name a b --model m", "m", {"served_model_name": ["a", "b"]}),
        ("generate --model m text", "m", {"text": "text"}),
        ("generate m text --model m", "m", {"text": "text"}),
        ("chat --seed 1 --model m", "m", {"seed": 1}),
        ("bench throughput --model m", "m", {}),
    ],
)
def test_the_model_may_be_a_flag(words: str, model: str, others: dict[str, object]) -> None:
    parsed = vars(PARSER.parse_args(words.split()))
    assert parsed["model"] == model
    assert others.items() <= parsed.items()


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--compilation-config.a 1", {"a": 1}),
        ("--compilation-config.a.b=x --compilation_config.a.c True", {"a": {"b": "x", "c": True}}),
        ("-cc.a+ 1 -cc.a+ 2", {"a": [1, 2]}),
        ('--compilation-config {"a":1,"b":2} --compilation-config.b 3', {"a": 1, "b": 3}),
        ("--compilation-config.a_b-c null", {"a_b-c": None}),
    ],
)
def test_fields_of_a_flag_are_one_object(words: str, value: object) -> None:
    parser = OneLineParser()
    parser.add_argument("--compilation-config", "-cc", type=read_object)
    assert parser.parse_args(words.split()).compilation_config == value


# As model cards, recipes and blogs write them, after the name of the model.
RECIPES = (
    (
        "--enable-reasoning --reasoning-parser deepseek_r1 --trust-remote-code -tp 4",
        "trust_remote_code",
    ),
    (
        "--tensor-parallel-size 8 --enable-expert-parallel --max-model-len 262144 "
        "--enable-auto-tool-choice --tool-call-parser qwen3_coder",
        "",
    ),
    (
        "--async-scheduling --no-enable-prefix-caching --cuda-graph-sizes 2048 "
        "--tool-call-parser openai --max-num-batched-tokens 8K --stream-interval 20 "
        "--gpu-memory-utilization=0.95",
        "cuda_graph_sizes stream_interval",
    ),
    (
        '--rope-scaling {"rope_type":"yarn","factor":4.0,'
        '"original_max_position_embeddings":32768} --max-model-len 131072',
        "",
    ),
    ("--hf-overrides.rope_scaling.rope_type yarn --hf-overrides.rope_scaling.factor 4.0", ""),
    (
        "--host 0.0.0.0 --port 8000 --dtype auto --api-key token-abc123 --generation-config vllm ",
        "",
    ),
    (
        "--limit-mm-per-prompt.image 2 --limit-mm-per-prompt.video 0 --mm-encoder-tp-mode data "
        "--mm-processor-cache-type shm",
        "limit_mm_per_prompt mm_encoder_tp_mode mm_processor_cache_type",
    ),
    (
        '-O.mode=3 --compilation-config {"cudagraph_mode":"FULL_AND_PIECEWISE"} '
        "--cudagraph-capture-sizes 1 2 4 8",
        "optimization_level compilation_config cudagraph_capture_sizes",
    ),
    ('--speculative-config {"method":"ngram","num_speculative_tokens":3}', ""),
    ("--spec-method ngram --spec-tokens 2 --spec-model [ngram]", ""),
    (
        '--allowed-origins ["*"] --allowed-methods ["*"] --uvicorn-log-level warning '
        "--disable-access-log-for-endpoints /health,/metrics",
        "uvicorn_log_level disable_access_log_for_endpoints",
    ),
    (
        "--kv-cache-dtype fp8 --block-size 64 --swap-space 16 --max-seq-len-to-capture 32768 "
        "--disable-log-requests",
        "swap_space max_seq_len_to_capture",
    ),
    ("--runner pooling --max-model-len 8k --enforce-eager", ""),
    (
        "--distributed-executor-backend mp -pp 1 -dp 1 -tp=2 --disable-custom-all-reduce",
        "disable_custom_all_reduce",
    ),
    ("--attention-backend FLASHMLA --load-format fastsafetensors --max-model-len -1", ""),
    (
        "--model-impl vllm --tokenizer-mode auto --config-format hf --task generate --device auto",
        "",
    ),
    (
        "--numa-bind --numa-bind-nodes 0 1 --renderer-num-workers 4 --api-server-count 4",
        "numa_bind numa_bind_nodes renderer_num_workers api_server_count",
    ),
    (
        "--max-num-queued-reqs 64 --max-num-queued-tokens 65536 --shutdown-timeout 60 "
        "--sse-keep-alive-interval 15",
        "sse_keep_alive_interval",
    ),
    (
        "--structured-outputs-config.backend xgrammar --guided-decoding-backend xgrammar "
        "--structured-outputs-config.disable_fallback True",
        "",
    ),
)


@pytest.mark.parametrize(("words", "ignored"), RECIPES)
def test_recipes_of_vllm_start(words: str, ignored: str) -> None:
    parsed = PARSER.parse_args(["serve", "org/name", *words.split()])
    assert ignored_flags(parsed).keys() == set(ignored.split())
    assert isinstance(engine_options(parsed), EngineOptions)


def test_flags_of_speculation_are_fields_of_one_object() -> None:
    given = '--spec-method suffix --speculative-config {"prompt_lookup_max":3} --spec-tokens 5'
    options = engine_options(make_parser().parse_args(["serve", "folder", *given.split()]))
    assert options.speculative_config == {
        "method": "suffix",
        "prompt_lookup_max": 3,
        "num_speculative_tokens": 5,
    }


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
        ("--convert classify", "invalid choice: 'classify'"),
        ("--nnodes 2", "--placement-strategy PACK or SPREAD places ranks on several nodes"),
        ("--return-tokens-as-token-ids", "requests set return_tokens_as_token_ids"),
        ("--enable-lora", "merge the adapter into the weights"),
        (
            "--max-modl-len 32K",
            "unrecognized arguments: --max-modl-len 32K; did you mean --max-model-len?",
        ),
        ("--frobnicate", "unrecognized arguments: --frobnicate (see pagedray serve --help)"),
        ("--model m", "the model is given twice: folder and --model m"),
        ("--model", "--model requires a folder or a Hub id"),
        ("--device-ids 0 1", "--device-ids is not supported: set CUDA_VISIBLE_DEVICES"),
        ("--structured-outputs-config.disable_any_whitespace true", "compiled by xgrammar"),
        ("--max-num-batched-tokens many", "max_num_batched_tokens must be a number of tokens"),
        ("-dp 2", "use num_replicas of Ray Serve"),
        (
            "--speculative-algorithm EAGLE3 --speculative-num-steps 3",
            "use --speculative-config with method and num_speculative_tokens",
        ),
        ("--speculative-model org/name", "use --speculative-config with method and num_spec"),
        ("--num-speculative-tokens 5", "use --speculative-config with method and num_spec"),
        ("--spec-tokens many", "--spec-tokens: invalid int value: 'many'"),
        ("--max-model-len many", "such as 32768, 32K or auto, not 'many'"),
        (
            "--max-num 3",
            "--max-num 3; did you mean --max-num-seqs or --max-num-batched-tokens?",
        ),
        ("--conf x.yaml", "unrecognized arguments: --conf x.yaml; did you mean --config?"),
        ("--max-logprobs 21", "at most 20 log-probabilities"),
        ("--calculate-kv-scales", "scales of keys and values are read from the checkpoint"),
        ("--guided-decoding-backend outlines", "structures are always compiled by xgrammar"),
        ("--no-enable-chunked-prefill", "long prompts are always computed in chunks"),
        ("--enable-sleep-mode m", "weights stay in memory"),
        ("--hf-overrides " + 10_000 * "[", "must be a JSON object such as"),
        ("--override-generation-config 1", "must be a JSON object such as"),
        ("--seed x", "invalid int value: 'x'"),
        ("--attention-backend", "expected one argument"),
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
    assert notes["--enable-prefix-caching"] == "the default"
    assert notes["--trust-remote-code"] == "no effect: code from checkpoints is never run"
    assert notes["--enable-chunked-prefill"].startswith("the default; its opposite is rejected: ")
    assert notes["--runner"] == "the same as `--task`"
    assert notes["--tokenizer-mode"].startswith("rejected, except for `auto`: ")


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


@pytest.mark.parametrize(
    ("command", "listed"),
    [
        ("", "Start a server with an OpenAI-compatible"),
        ("keys", "Print a new API key"),
        ("bench", "Measure the latency of one batch"),
        ("deploy", "Check Helm values for errors"),
        ("completion", "{bash,tcsh,zsh}"),
    ],
)
def test_a_command_that_needs_a_choice_prints_its_help(
    command: str, listed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(command.split())
    printed = capsys.readouterr()
    assert printed.out.startswith(f"usage: pagedray {command}".rstrip())
    assert listed in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serv m", "pagedray: error: serv is not a command; did you mean serve?"),
        ("sreve m", "sreve is not a command; did you mean serve?"),
        ("server m", "server is not a command; did you mean serve?"),
        ("gen m x", "gen is not a command; did you mean generate?"),
        ("benchmark serve", "benchmark is not a command; did you mean bench?"),
        ("compl bash", "compl is not a command; did you mean complete or completion?"),
        ("Serve m", "Serve is not a command; did you mean serve?"),
        ("models", "models is not a command; choose from serve, generate, "),
        ("org/model", "did you mean pagedray serve org/model?"),
        ("bench serv", "pagedray bench: error: serv is not a command; did you mean serve?"),
        ("bench thru", "choose from latency, throughput, serve"),
        ("bench throughptu m", "did you mean throughput?"),
        ("deploy chek", "chek is not a command; did you mean check?"),
        ("keys create", "create is not a command; choose from new"),
    ],
)
def test_a_mistyped_command_is_told_which_was_meant(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert "'" not in error


def test_a_wrong_value_of_an_argument_lists_the_allowed_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "fish"])
    assert "invalid choice: 'fish' (choose from" in capsys.readouterr().err
