"""The log: one line for each call, whatever a client sends and however often."""

from __future__ import annotations

import io
import json
import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from cluster.serving.inputs import CallOrigin, GenerationInput
from cluster.serving.telemetry.call_log import RejectedCalls
from cluster.serving.telemetry.log_lines import LineLimit, LineRate, logging_to
from pagedray.errors import InvalidRequestError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.serving.servicer import Servicer
    from cluster.serving.telemetry.log_lines import LogFormat
    from cluster.serving.text.tokenizer import Tokenizer

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
NASTY = 'a\nlevel=ERROR fake\r\x1b[2J\u2028"\x00'


async def logged(servicer: Servicer, form: LogFormat, **given: object) -> list[str]:
    stream = io.StringIO()
    with logging_to(stream, form=form):
        fields: dict[str, object] = {
            "prompts": ("my secret words",),
            "sampling": {"max_tokens": 3},
            "client_id": "call-1",
        }
        generation = await servicer.start_generation(GenerationInput(**fields | given))  # type: ignore[arg-type]  # the test's
        async for _ in generation.outputs():
            pass
        generation.close()
    # A server of another test may log something meanwhile.
    return [line for line in stream.getvalue().splitlines() if "call-1" in line]


async def test_json_line_describes_the_call(servicer: Servicer) -> None:
    origin = CallOrigin(frontend="grpc", traceparent=f"00-{TRACE_ID}-00f067aa0ba902b7-01")
    (line,) = await logged(servicer, "json", origin=origin)
    found = json.loads(line)
    expected = {
        "level": "info",
        "id": "call-1",
        "frontend": "grpc",
        "operation": "text_completion",
        "outcome": "length",
        "generated_tokens": 3,
        "trace_id": TRACE_ID,
    }
    assert expected.items() <= found.items()
    assert 0 <= found["validated_s"] <= found["first_token_s"] <= found["duration_s"]
    assert "secret" not in line


async def test_line_of_a_rejected_id_is_no_longer_than_others(servicer: Servicer) -> None:
    stream = io.StringIO()
    given = GenerationInput(prompts=("x",), client_id="\x85" * 2**20)
    with logging_to(stream, form="text"), pytest.raises(InvalidRequestError):
        await servicer.start_generation(given)
    assert "id=" in stream.getvalue()
    assert len(stream.getvalue()) < 2**11


async def test_text_line_says_the_same(servicer: Servicer) -> None:
    (line,) = await logged(servicer, "text")
    assert " INFO call id=call-1 " in line
    assert " outcome=length " in line
    assert "secret" not in line


def _log(form: LogFormat, message: str, **fields: object) -> str:
    stream = io.StringIO()
    with logging_to(stream, form=form):
        logging.getLogger("cluster.test").info(message, extra={"fields": fields})
    return stream.getvalue()


@pytest.mark.parametrize("form", ["text", "json"])
def test_line_is_one_line_whatever_is_in_it(form: LogFormat) -> None:
    for text in (_log(form, "call", id=NASTY), _log(form, NASTY)):
        assert text.endswith("\n")
        assert text[:-1].isprintable()
    assert json.loads(_log("json", "call", id=NASTY))["id"] == NASTY


def test_level_filters_lines() -> None:
    stream = io.StringIO()
    with logging_to(stream, level="warning"):
        logging.getLogger("cluster.test").info("quiet")
        logging.getLogger("cluster.test").warning("loud")
    assert "quiet" not in stream.getvalue()
    assert "WARNING loud" in stream.getvalue()


def test_lines_of_a_rank_in_this_process_are_written() -> None:
    stream = io.StringIO()
    with logging_to(stream):
        for name in ("attention.a", "pagedray.b", "workers.c", "another_library"):
            logging.getLogger(name).info("from %s", name)
    lines = stream.getvalue().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["attention.a", "pagedray.b", "workers.c"]


class _StuckStream(io.StringIO):
    """A pipe that is not read for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.is_free = threading.Event()

    def write(self, text: str) -> int:
        self.is_free.wait()
        return super().write(text)


def test_unread_stream_blocks_no_caller() -> None:
    stream = _StuckStream()
    logger = logging.getLogger("cluster.test")
    with logging_to(stream):
        for number in range(10_100):
            logger.info("line %d", number)
        stream.is_free.set()
        while stream.getvalue().count("\n") < 10_000:
            stream.is_free.wait()
        logger.info("after")
    text = stream.getvalue()
    assert "line 0\n" in text
    assert "line 10099" not in text
    num_lost = 10_100 - text.count("line ")
    assert f"after (dropped {num_lost} lines before this one)" in text


Json = dict[str, Any]  # Any: JSON
TURN = {"messages": [{"role": "user", "content": "hi"}]}
REJECTED_NASTY = "a\nINFO rejected \x1b[2J\u2028\x00"


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
        own_server.frontends.servicer._phase = _starting
        try:
            assert httpx.get(f"{own_server.url}/ready").status_code == 503
        finally:
            own_server.frontends.servicer._phase = _ready

    _ready = own_server.frontends.servicer._phase
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
        httpx.post(f"{own_server.url}{CHAT}", json=TURN | {"tool_choice": "x", REJECTED_NASTY: 1})
        httpx.post(f"{own_server.url}{CHAT}", json=TURN | {"model": REJECTED_NASTY + "y" * 10_000})

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


def test_a_line_reports_what_came_since_the_last_one() -> None:
    now_s = 100.0
    limit = LineLimit(interval_s=60.0, clock=lambda: now_s)
    assert [limit.count_event() for _ in range(3)] == [1, 0, 0]
    now_s += 59.0
    assert limit.count_event() == 0
    now_s += 1.0
    assert [limit.count_event() for _ in range(2)] == [4, 0]
