"""`pagedray bench serve` against our frontends, and another server of OpenAI's wire."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from cluster.cli.bench.client import Target
from cluster.cli.bench.grpc_client import GrpcClient
from cluster.cli.bench.http_client import HttpClient
from cluster.cli.commands import main
from tests.cli.bench.other_server import NUM_TOKENS, OtherServer, serving
from tests.cli.loads_server import serving as not_found
from tests.load.measured_server import write_keys
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from cluster.cli.bench.client import Backend
    from cluster.serving.text.tokenizer import Tokenizer

SHORT = ("--num-prompts=6", "--random-input-len=12", "--random-output-len=5", "--ignore-eos")


@pytest.fixture
def other() -> Iterator[OtherServer]:
    with serving() as found:
        yield found


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return the exit code, and what was printed as a result and as an error."""
    try:
        code = main(["bench", "serve", *arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def base_url(server: Server, backend: str) -> str:
    return f"grpc://{server.grpc_target}" if backend.startswith("grpc") else server.url


@pytest.mark.parametrize("backend", ["openai", "openai-chat", "grpc", "grpc-chat"])
def test_every_backend_counts_what_the_engine_served(
    server: Server, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = (f"--backend={backend}", f"--base-url={base_url(server, backend)}")
    code, out, _ = run(capsys, *target, *SHORT, "--max-concurrency=2", "--json")
    assert code == 0
    report = json.loads(out)
    submitted = server.engine.log.submitted
    # The first one warms the server up.
    assert len(submitted) == 1 + report["completed"] == 7
    assert report["total_output_tokens"] == 6 * 5
    assert report["total_input_tokens"] == sum(len(r.prompt_token_ids) for r in submitted[1:])
    assert {request.sampling.temperature for request in submitted} == {0.0}
    assert all(request.sampling.ignore_eos for request in submitted)
    assert report["max_concurrent_requests"] == 2
    assert 0.0 < report["p50_ttft_ms"] <= report["p99_ttft_ms"] <= report["p99_e2el_ms"]


@pytest.mark.parametrize("backend", ["openai", "grpc"])
def test_random_prompts_have_the_length_asked_for(server: Server, backend: str) -> None:
    url = base_url(server, backend)
    lengths = ("--num-prompts=8", "--random-input-len=40", "--random-output-len=3")
    assert main(["bench", "serve", f"--backend={backend}", f"--base-url={url}", *lengths]) == 0
    prompts = [request.prompt_token_ids for request in server.engine.log.submitted]
    assert {len(one) for one in prompts} == {40}
    assert len(set(prompts)) == 9


@pytest.mark.parametrize("backend", ["openai", "grpc"])
def test_random_prompts_may_fill_the_context(
    tokenizer: Tokenizer, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ("--num-prompts=2", "--random-input-len=120", "--random-output-len=8")
    with Server(tokenizer, context=128) as server:
        given = (f"--backend={backend}", f"--base-url={base_url(server, backend)}", *lengths)
        code, _, error = run(capsys, *given)
        assert code == 0, error
        prompts = [request.prompt_token_ids for request in server.engine.log.submitted]
    # Not every tokenizer has a text of each length.
    assert {len(one) for one in prompts} <= {119, 120}


def test_equal_seeds_send_equal_requests(server: Server, folder: Path) -> None:
    sent = []
    ratio = ("--random-range-ratio=0.5", "--random-prefix-len=10")
    for seed in (3, 3, 4):
        server.engine.reset()
        url = f"--base-url={server.url}"
        main(["bench", "serve", url, *SHORT, *ratio, f"--seed={seed}", f"--tokenizer={folder}"])
        log = server.engine.log.submitted
        sent.append(sorted((one.prompt_token_ids, one.sampling.max_tokens) for one in log))
    assert sent[0] == sent[1] != sent[2]
    assert len({tokens[:9] for tokens, _ in sent[0]}) == 1
    assert len({len(tokens) for tokens, _ in sent[0]}) > 1


def test_conversations_are_sent_with_the_lengths_of_their_answers(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    answer = "w " * 9
    turns = [{"value": "one two three four five"}, {"value": answer}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": []}]))
    dataset = ("--dataset-name=sharegpt", f"--dataset-path={path}", f"--tokenizer={folder}")
    assert main(["bench", "serve", f"--base-url={server.url}", "--num-prompts=2", *dataset]) == 0
    (prompts, lengths) = zip(
        *((r.prompt_token_ids, r.sampling.max_tokens) for r in server.engine.log.submitted),
        strict=True,
    )
    assert set(prompts) == {tuple(server.tokenizer.encode("one two three four five"))}
    assert set(lengths) == {len(server.tokenizer.encode(answer))}


def test_table_and_file_have_the_figures(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"--base-url={server.url}/v1"
    shown = ("--percentile-metrics=ttft,tpot", "--metric-percentiles=50,99.9")
    saved = ("--save-result", f"--result-dir={tmp_path}", "--result-filename=r.json")
    goals = ("--goodput", "ttft:100000", "tpot:100000")
    code, out, _ = run(capsys, url, *SHORT, *shown, *saved, *goals)
    assert code == 0
    assert "Time to first token (ttft)" in out
    assert "p99.9" in out
    assert "itl" not in out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["request_goodput"] == pytest.approx(report["request_throughput"])
    assert report["request_goodput"] > 0.0


def test_requests_over_a_limit_are_no_goodput(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.engine.step_s = 0.02
    url = f"--base-url={server.url}"
    code, out, _ = run(capsys, url, *SHORT, "--json", "--goodput", "e2el:50")
    assert code == 0
    assert json.loads(out)["request_goodput"] == 0.0


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_other_servers_are_measured(
    other: OtherServer, folder: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (f"--backend={backend}", f"--base-url={other.url}", f"--tokenizer={folder}", "--json")
    code, out, _ = run(capsys, *given, *SHORT, '--extra-body={"top_p": 0.5}', "--header", "x-a=b")
    assert code == 0
    report = json.loads(out)
    # It reports no usage, so that messages with text count.
    assert report["total_output_tokens"] == 6 * NUM_TOKENS
    assert report["model_id"] == "other-model"
    body = other.bodies[-1]
    assert (body["model"], body["top_p"], body["max_tokens"]) == ("other-model", 0.5, 5)
    assert ("messages" in body) == (backend == "openai-chat")
    assert other.headers[-1]["x-a"] == "b"


@pytest.mark.parametrize("format_flags", [("--json",), ()])
def test_drafts_of_the_test_are_counted(
    other: OtherServer,
    folder: Path,
    format_flags: Sequence[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = (f"--base-url={other.url}", f"--tokenizer={folder}", *format_flags)
    code, out, _ = run(capsys, *given, *SHORT)
    assert code == 0
    if not format_flags:
        lines = [" ".join(line.split()) for line in out.splitlines()]
        assert "Drafts accepted (%) 62.5" in lines
        assert "Tokens of a sequence with drafts per step 3.50" in lines
        return
    found = {name: value for name, value in json.loads(out).items() if "spec_decode" in name}
    # The drafts of the request before the test do not count.
    assert found == {
        "spec_decode_acceptance_rate": 62.5,
        "spec_decode_acceptance_length": 3.5,
        "spec_decode_num_drafts": 6 * 2 * 2,
        "spec_decode_draft_tokens": 6 * 2 * 8,
        "spec_decode_accepted_tokens": 6 * 2 * 5,
    }


@pytest.mark.parametrize("backend", ["openai", "grpc"])
async def test_clients_read_the_drafts_of_our_servers(server: Server, backend: Backend) -> None:
    target = Target(backend=backend, base_url=base_url(server, backend))
    async with (GrpcClient if target.is_grpc else HttpClient)(target) as client:
        await client.open(None)
        assert await client.count_drafts() == (5, 20, 7)


def one_error(found: tuple[int, str, str]) -> str:
    code, out, error = found
    assert code in (1, 2)
    assert out == ""
    assert error.count("\n") == 1
    assert error.startswith("pagedray")
    return error


def test_rejections_are_one_line(
    other: OtherServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, local = f"--base-url={other.url}", f"--tokenizer={folder}"
    other.status = 401
    error = one_error(run(capsys, url, local, *SHORT))
    assert "Status 401: No such key." in error
    other.status, other.ends_early = 200, True
    assert "before its last event" in one_error(run(capsys, url, local, *SHORT))
    other.fails_in_stream = True
    assert "It broke." in one_error(run(capsys, url, local, *SHORT))
    # It cannot count tokens.
    assert "Status 404" in one_error(run(capsys, url, *SHORT))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "{url} is not an OpenAI-compatible server: GET /v1/models returned 404."),
        (
            ("--base-url={url}/loads",),
            "compatible server: GET /loads/v1/models returned 404",
        ),
        (
            ("--model=m", "--tokenizer={folder}"),
            "{url} is not an OpenAI-compatible server: POST /v1/completions returned 501.",
        ),
        (
            ("--model=m", "--tokenizer={folder}", "--backend=openai-chat"),
            "OpenAI-compatible server: POST /v1/chat/completions returned 501.",
        ),
        (("--model=m",), "The server cannot tokenize the prompts. Status 501: "),
        (
            ("--backend=grpc", "--base-url={grpc}"),
            "The server does not respond in gRPC; ",
        ),
    ],
)
def test_a_server_of_something_else_is_recognized(
    flags: Sequence[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with not_found(b"<html>", 404) as (url, _):
        words = {"url": url, "folder": folder, "grpc": url.replace("http:", "grpc:")}
        given = (one.format_map(words) for one in flags)
        error = one_error(run(capsys, f"--base-url={url}", *SHORT, *given))
        assert message.format_map(words) in error


def test_failures_amid_the_test_are_counted(
    other: OtherServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other.rejected_after = 3
    url, local = f"--base-url={other.url}", f"--tokenizer={folder}"
    code, out, error = run(capsys, url, local, *SHORT, "--max-concurrency=1", "--json")
    assert code == 1
    assert "4 of 6 requests failed, the first one: Status 429: No such key." in error
    assert (json.loads(out)["completed"], json.loads(out)["failed"]) == (2, 4)


def test_the_port_of_grpc_is_recognized(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    error = one_error(run(capsys, f"--base-url=http://{server.grpc_target}", *SHORT))
    assert "requires --backend grpc" in error


def test_prompts_beyond_the_context_are_rejected(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    length = "--random-input-len=100000"
    error = one_error(run(capsys, f"--base-url={server.url}", *SHORT, length))
    assert "The server cannot tokenize the prompts. Status 400: " in error


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--base-url=127.0.0.1:8000"], "http://HOST:PORT"),
        (["--base-url=http://[::1"], "is not a URL"),
        (["--base-url=http://h:99999"], "is not a URL"),
        (
            ["--base-url=http://127.0.0.1:1"],
            "Cannot reach the server at 127.0.0.1:1: Connection refused.",
        ),
        (["--base-url=http://127.0.0.1:8000", "--backend=grpc"], "grpc://HOST:PORT"),
        (["--backend=grpc", "--port=1"], "UNAVAILABLE"),
        (["--backend=grpc", "--endpoint=/x"], "require HTTP"),
        (["--backend=tgi"], "invalid choice"),
        (["--base-url="], "http://HOST:PORT"),
        (["--dataset-name=sharegpt"], "requires --dataset-path"),
        (["--dataset-path=x"], "--dataset-path requires --dataset-name sharegpt"),
        (["--sharegpt-output-len=5"], "--sharegpt-output-len requires --dataset-name sharegpt"),
        (
            ["--dataset-name=sharegpt", "--dataset-path=x", "--random_input_len=1024"],
            "--random-input-len requires --dataset-name random",
        ),
        (["--base-url=http://h", "--port=8000"], "--port cannot be used with --base-url"),
        (["--host=127.0.0.1", "--base-url=http://h"], "--host cannot be used with --base-url"),
        (["--burstiness=1"], "--burstiness requires --request-rate"),
        (["--result-filename=x"], "--result-filename requires --save-result"),
        (["--result-dir=."], "--result-dir requires --save-result"),
        (["--save-result", "--result-dir=/dev/null"], "--result-dir /dev/null is not a folder"),
        (["--api-key-file=/dev/null/x"], "--api-key-file /dev/null/x: Not a directory.\n"),
        (["--goodput", "itl:3"], "must be NAME:MS"),
        (["--request-rate=0"], "must be from"),
        (["--extra-body=3"], "must be a JSON object"),
        (["--tls-ca=x"], "--tls-ca requires https"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in one_error(run(capsys, *arguments, "--num-prompts=1"))


def test_keys_come_from_a_file_or_the_environment(
    tokenizer: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = write_keys(tmp_path / "keys.toml", "one")
    (tmp_path / "key").write_text(keys["one"])
    with Server(tokenizer, key_file=tmp_path / "keys.toml") as server:
        for backend, rejection in (("openai", "Status 401"), ("grpc", "UNAUTHENTICATED")):
            given = (f"--backend={backend}", f"--base-url={base_url(server, backend)}", *SHORT)
            monkeypatch.setenv("OPENAI_API_KEY", "wrong")
            error = one_error(run(capsys, *given))
            assert rejection in error
            assert "Use --api-key-file or set PAGEDRAY_API_KEY or OPENAI_API_KEY." in error
            assert run(capsys, *given, f"--api-key-file={tmp_path / 'key'}")[0] == 0
            monkeypatch.setenv("OPENAI_API_KEY", keys["one"])
            assert run(capsys, *given)[0] == 0
