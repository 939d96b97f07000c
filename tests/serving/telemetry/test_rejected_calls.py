"""Each rejected call has a line in the log, whatever a client sends and however often."""

from __future__ import annotations

import io
import json
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from cluster.serving.telemetry.call_log import RejectedCalls
from cluster.serving.telemetry.log_lines import LineRate, logging_to
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.serving.text.tokenizer import Tokenizer

Json = dict[str, Any]  # Any: JSON
TURN = {"messages": [{"role": "user", "content": "hi"}]}
NASTY = "a\nINFO rejected \x1b[2J\u2028\x00"


@pytest.fixture(scope="module")
def own_server(tokenizer: Tokenizer) -> Iterator[Server]:
    """A server whose clients no other test rejects."""
    with Server(tokenizer) as server:
        yield server


def rejections(server: Server, send: Callable[[], object]) -> list[Json]:
    """Return the fields of the lines of rejected calls."""
    server.frontends.servicer.rejected_calls = RejectedCalls()
    stream = io.StringIO()
    with logging_to(stream, form="json"):
        send()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in lines if line["message"] == "rejected"]


def posted(server: Server, path: str, **given: Any) -> Callable[[], httpx.Response]:
    return lambda: httpx.request(given.pop("method", "POST"), f"{server.url}{path}", **given)


CHAT = "/v1/chat/completions"
JSON_TYPE = {"content-type": "application/json"}
CASES: list[tuple[str, Json, int, str | None, str]] = [
    (CHAT, {"json": TURN | {"temprature": 1}}, 400, "temprature",
     "temprature is not supported: did you mean temperature?"),
    (CHAT, {"json": TURN | {"temperature": "hot"}}, 400, "temperature",
     "temperature must be a number, not 'hot'."),
    (CHAT, {"json": TURN | {"temperature": 500}}, 400, "temperature",
     "temperature must be from 0 to 100, not 500."),
    (CHAT, {"json": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}}, 400,
     "messages.0.content.0",
     "messages.0.content.0 is not supported: the model only reads text, not image_url parts."),
    (CHAT, {"json": TURN | {"model": "other"}}, 404, "model",
     "The model 'other' does not exist; this server serves 'tiny'."),
    (CHAT, {"content": b"{", "headers": JSON_TYPE}, 400, None, "The body is not valid JSON"),
    (CHAT, {"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, None,
     "Content-Type must be application/json."),
    (CHAT, {"json": TURN, "headers": {"host": "evil.example"}}, 421, None,
     "This server rejects requests for the host 'evil.example'."),
    (CHAT, {"method": "GET"}, 405, None, "Method not allowed; use POST."),
    ("/v1/embeddings", {"json": {"input": "x"}}, 400, "model",
     "The model tiny generates text; for embeddings"),
    ("/v1/responses", {"json": {"input": "hi", "max_tokens": 5}}, 400, "max_tokens",
     "max_tokens is not supported: did you mean max_output_tokens?"),
    ("/v1/messages", {"json": {"model": "tiny", **TURN}}, 400, "max_tokens",
     "max_tokens is required."),
    ("/v1/completions", {"json": {"prompt": "x", "stream": True, "stop": 5}}, 400, "stop",
     "stop must be a list of strings."),
    ("/sleep", {}, 404, None, "Not found: /sleep is not available: weights stay on the device;"),
    ("/v1/nothing", {"method": "GET"}, 404, None, "Not found: no such endpoint."),
]  # fmt: skip


@pytest.mark.parametrize(("path", "given", "status", "param", "error"), CASES)
def test_rejected_request_has_one_line(
    own_server: Server, path: str, given: Json, status: int, param: str | None, error: str
) -> None:
    method = given.get("method", "POST")
    [line] = rejections(own_server, posted(own_server, path, **given))
    found = {name: line.get(name) for name in ("frontend", "status", "method", "path", "param")}
    expected = {"frontend": "http", "status": status, "method": method, "path": path}
    assert found == expected | {"param": param}
    assert line["error"].startswith(error)
    assert line["level"] == "info"


def test_a_head_that_is_too_large_has_a_line(own_server: Server) -> None:
    headers = {"x-long": "y" * 2**17}
    [line] = rejections(own_server, posted(own_server, CHAT, json=TURN, headers=headers))
    assert line["status"] == 431
    assert line["error"].startswith("The head or trailers of the request exceed")


def test_accepted_requests_and_health_checks_have_no_line(own_server: Server) -> None:
    def send() -> None:
        httpx.post(f"{own_server.url}{CHAT}", json=TURN | {"max_tokens": 2})
        httpx.get(f"{own_server.url}/health")
        own_server.frontends.servicer._admission._phase = _starting
        try:
            assert httpx.get(f"{own_server.url}/ready").status_code == 503
        finally:
            own_server.frontends.servicer._admission._phase = _ready

    _ready = own_server.frontends.servicer._admission._phase
    _starting = type(_ready).STARTING
    assert rejections(own_server, send) == []


RPC_CASES: list[tuple[str, Any, str, str | None, str]] = [
    ("Generate", pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=500)),
     "INVALID_ARGUMENT", "sampling.temperature", "temperature must be from 0 to 100, not 500."),
    ("Generate", pb.GenerateRequest(text="x", model="other"), "NOT_FOUND", "model",
     "The model 'other' does not exist; this server serves 'tiny'."),
    ("Chat", pb.ChatRequest(), "INVALID_ARGUMENT", "messages", "messages must not be empty."),
    ("Tokenize", pb.TokenizeRequest(), "INVALID_ARGUMENT", "prompt",
     "One of text or conversation must be set."),
    ("Embed", pb.EmbedRequest(prompts=[pb.EmbedPrompt(text="x")]), "INVALID_ARGUMENT", "model",
     "The model tiny generates text;"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "message", "status", "param", "error"), RPC_CASES)
def test_rejected_rpc_has_one_line(
    own_server: Server, method: str, message: Any, status: str, param: str | None, error: str
) -> None:
    def send() -> None:
        with grpc.insecure_channel(own_server.grpc_target) as channel, suppress(grpc.RpcError):
            answer = getattr(pagedray_pb2_grpc.GenerationServiceStub(channel), method)(message)
            list(answer)

    [line] = rejections(own_server, send)
    names = ("frontend", "status", "method", "path", "param")
    path = f"/pagedray.v1.GenerationService/{method}"
    expected = dict(zip(names, ("grpc", status, method, path, param), strict=True))
    assert {name: line.get(name) for name in names} == expected
    assert line["error"].startswith(error)


def test_a_client_cannot_write_lines_of_its_own(own_server: Server) -> None:
    def send() -> None:
        httpx.get(f"{own_server.url}/%0aINFO%20rejected%1b[2J%e2%80%a8%00")
        httpx.post(f"{own_server.url}{CHAT}", json=TURN | {"tool_choice": "x", NASTY: 1})
        httpx.post(f"{own_server.url}{CHAT}", json=TURN | {"model": NASTY + "y" * 10_000})

    own_server.frontends.servicer.rejected_calls = RejectedCalls()
    stream = io.StringIO()
    with logging_to(stream, form="text"):
        send()
    lines = [line for line in stream.getvalue().split("\n") if " rejected frontend" in line]
    assert len(lines) == 3
    for line in stream.getvalue().split("\n"):
        assert line.isprintable()
        assert len(line) < 1000
        assert not line.startswith("INFO")


def test_lines_are_limited_for_each_status() -> None:
    now_s = 100.0
    records: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Kept()
    logger = logging.getLogger("cluster.serving.telemetry.call_log")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    calls = RejectedCalls(lambda: LineRate(clock=lambda: now_s))

    def reject(status: int) -> None:
        calls.note("http", status=status, method="GET", path="/", param=None, error="No.")

    try:
        for _ in range(1000):
            reject(401)
        assert len(records) == 20
        reject(400)
        assert len(records) == 21
        now_s += 1.0
        reject(401)
        reject(401)
        assert len(records) == 22
        assert records[-1].__dict__["fields"]["omitted"] == 980
        now_s += 3600.0
        for _ in range(1000):
            reject(401)
        assert len(records) == 42
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
