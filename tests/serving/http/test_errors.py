"""Errors over HTTP: their status, body and headers, and the limits of requests."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from starlette.datastructures import Headers

from cluster.serving.http.http_call import declared_length
from cluster.serving.http.request_checks import MAX_HEAD_BYTES, MAX_HEADERS
from cluster.serving.http.server import HttpConnection
from cluster.serving.http_app import build_http_app
from pagedray.errors import LethalRequestError, OverloadedError, WorkerError
from tests.fakes import wait_for
from tests.serving.conftest import CONTEXT
from tests.serving.fake_engine import failing_sequence
from tests.serving.http.raw_requests import CHUNKED, HOST, JSON_HEAD, connect, read_to_end

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serving.conftest import Server
    from tests.serving.fake_engine import FakeEngine


def _post(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    # Any: JSON
    return http.post(path, json={"model": "tiny", **body})


def test_dead_engine_is_unavailable(http: httpx.Client, engine: FakeEngine) -> None:
    engine.fail_all(WorkerError("A rank died."))
    for answer in (http.get("/health"), _post(http, prompt="x")):
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", "/openapi.json"])
def test_head_has_the_headers_of_get_and_no_body(http: httpx.Client, path: str) -> None:
    whole, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert int(head.headers["content-length"]) > 0
    # The connection is still in step.
    assert http.get(path).status_code == 200
    assert http.head("/v1/completions").headers["allow"] == "POST"


def test_full_queue_sends_retry_after(http: httpx.Client, engine: FakeEngine) -> None:
    engine.rejection = OverloadedError("The queue is full.", retry_after_s=1.5)
    answer = _post(http, prompt="x", stream=True)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert answer.json()["error"] == {
        "message": "The queue is full.",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }


def test_engine_failure_ends_a_stream_with_an_error(
    openai_client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.step_s = 0.005
    stream = openai_client.completions.create(model="tiny", prompt="x", max_tokens=200, stream=True)
    next(stream)
    engine.fail_all(WorkerError("A rank died."))
    with pytest.raises(openai.APIError, match="A rank died"):
        list(stream)


SLOW = "its masks took 0.62 s of CPU time for 3 tokens"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        ("", 500, "The engine could not compute the next token."),
        (SLOW, 400, f"The output cannot follow its structure: {SLOW}."),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_sequence_that_failed_says_whose_fault_it_is(
    http: httpx.Client, server: Server, error: str, status: int, message: str, stream: bool
) -> None:
    with failing_sequence(server, error=error):
        answer = _post(http, prompt="x", stream=stream)
    assert answer.status_code == (200 if stream else status)
    body = answer.text.partition("data: ")[2].partition("\n")[0] if stream else answer.text
    found = json.loads(body)["error"]
    assert found["message"] == message
    assert (found["type"] == "invalid_request_error") is (status == 400)


def test_request_that_kills_ranks_is_not_sent_again(
    openai_client: openai.OpenAI, server: Server
) -> None:
    client = openai_client.with_options(max_retries=2)
    lethal = pytest.raises(openai.UnprocessableEntityError, match="Do not send it again")
    with failing_sequence(server, is_lethal=True), lethal:
        client.completions.create(model="tiny", prompt="x")
    assert len(server.engine.log.submitted) == 1


@pytest.mark.parametrize(
    ("is_lethal", "text"), [(False, "could not compute"), (True, "Do not send it again")]
)
@pytest.mark.parametrize("is_chat", [False, True])
def test_stream_of_a_failed_sequence_ends_with_its_text_and_an_error(
    openai_client: openai.OpenAI, server: Server, is_chat: bool, is_lethal: bool, text: str
) -> None:
    token_ids = server.tokenizer.encode("import", add_special_tokens=False)
    with failing_sequence(server, *token_ids, is_lethal=is_lethal):
        pieces: list[str | None] = []
        # The second choice has not ended, but the error ends the stream.
        with pytest.raises(openai.APIError, match=text):  # noqa: PT012  # reads until then
            if is_chat:
                for chunk in openai_client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "x"}], n=2, stream=True
                ):
                    pieces.append(chunk.choices[0].delta.content)
                    assert chunk.choices[0].finish_reason is None
            else:
                for one in openai_client.completions.create(
                    model="tiny", prompt="x", n=2, stream=True
                ):
                    pieces.append(one.choices[0].text)
                    assert one.choices[0].finish_reason is None
    assert pieces == ["import"]
    assert server.engine.log.aborted == [server.engine.log.submitted[0].id]


def test_error_is_the_last_event_before_the_end(http: httpx.Client, server: Server) -> None:
    with failing_sequence(server, is_lethal=True):
        options = {"include_usage": True}
        text = _post(http, prompt="x", stream=True, stream_options=options).text
    error, done, rest = text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"] == {
        "message": str(LethalRequestError()),
        "type": "server_error",
        "param": None,
        "code": "lethal_request",
    }
    assert (done, rest) == ("data: [DONE]", "")


def test_defect_reveals_no_details(
    http: httpx.Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.rejection = KeyError("/home/secret at 0xdeadbeef")  # type: ignore[assignment]  # a defect
    answer = _post(http, prompt="x")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "Internal server error; see the server log."
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/index.html", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/docs/", 404),
        ("POST", "/v1/responses/compact", 404),
        ("POST", "/v1/responses/resp_1", 405),
        ("GET", "/V1/models", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/health", 405),
    ],
)
def test_unknown_path_or_method_is_an_error_in_openais_format(
    http: httpx.Client, method: str, path: str, status: int
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": "tiny", "prompt": NaN}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "\xff"}',
        b"[" * 100_000,
        b'{"model": "tiny", "seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_malformed_json_is_a_400(http: httpx.Client, engine: FakeEngine, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert engine.log.submitted == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
    ],
)
def test_other_content_types_are_rejected(
    http: httpx.Client, headers: dict[str, str], status: int
) -> None:
    answer = http.post("/v1/completions", content=b"{}", headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_declared_large_body_is_rejected_before_it_is_sent(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.frontends.http_port or 0), 60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1000000000\r\n\r\n"
        )
        assert b" 413 " in connection.recv(100)


def test_chunked_body_slightly_over_the_limit_is_rejected(http: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        yield b" " * 4 * 2**20
        yield b" "

    headers = {"content-type": "application/json"}
    for _ in range(5):
        answer = http.post("/v1/completions", content=pieces(), headers=headers)
        assert answer.status_code == 413


def test_large_chunked_body_is_rejected(http: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(5 * 16):
            yield b" " * 2**16

    headers = {"content-type": "application/json"}
    try:
        answer = http.post("/v1/completions", content=pieces(), headers=headers)
    except httpx.WriteError:
        # The server responded and closed while the client was writing.
        return
    assert answer.status_code == 413
    assert f"{2**20 + 8 * 128 * CONTEXT} bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({f"x-{number}": "a" for number in range(100)}, 200),
        ({f"x-{number}": "a" for number in range(129)}, 431),
        ({"x-long": "a" * 60_000}, 200),
        ({"x-long": "a" * 70_000}, 431),
    ],
)
async def test_large_head_is_rejected_behind_a_server_without_limits(
    server: Server, headers: dict[str, str], status: int
) -> None:
    """As behind Ray Serve's proxy."""
    transport = httpx.ASGITransport(build_http_app(server.frontends.servicer, read_timeout_s=60.0))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/v1/models", headers=headers)
    assert answer.status_code == status
    if status == 431:
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /health HTTP/1.1\r\n" + HOST + b"A: ",
        b"GET /",
        JSON_HEAD + CHUNKED + b"\r\n1;",
        JSON_HEAD + CHUNKED + b"\r\n1\r\n{\r\n0\r\nA: ",
    ],
    ids=["header", "path", "chunk extension", "trailer"],
)
def test_size_outside_the_body_is_bounded(
    server: Server, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    num_received = 0
    receive = HttpConnection.data_received

    def counted(self: HttpConnection, data: bytes) -> None:
        nonlocal num_received
        receive(self, data)
        num_received += len(data)

    monkeypatch.setattr(HttpConnection, "data_received", counted)
    with connect(server) as connection:
        connection.sendall(begun)
        num_sent = len(begun)
        answer = b""
        while not answer and num_sent < 2**20:
            connection.sendall(b"a" * 2**13)
            num_sent += 2**13
            # The server has answered by then if it does.
            wait_for(lambda: num_received == num_sent)  # noqa: B023
            connection.setblocking(False)
            with suppress(BlockingIOError):
                answer = connection.recv(2**16)
            connection.setblocking(True)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert num_sent <= 2 * MAX_HEAD_BYTES


def test_complete_head_is_bounded_too(server: Server) -> None:
    long = b"A: %b\r\n" % (b"a" * MAX_HEAD_BYTES)
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + HOST + long + b"\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("num_more", [0, 1])
def test_number_of_headers_is_bounded(server: Server, num_more: int) -> None:
    # Beside the host.
    others = b"a:\r\n" * (MAX_HEADERS - 2 + num_more)
    with connect(server) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\n" + HOST + others + b"Connection: close\r\n\r\n"
        )
        received = read_to_end(connection)
    assert received.startswith(b"HTTP/1.1 431 " if num_more else b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ("5", 5),
        ("0", 0),
        ("00", 0),
        ("5 ", 5),
        ("\t5", 5),
        ("0" * 30 + "5", 5),
        ("9" * 5000, int("9" * 20)),
        ("", None),
        ("+5", None),
    ],
)
def test_length_that_a_request_declares(given: str, length: int | None) -> None:
    assert declared_length(Headers({"content-length": given})) == length
