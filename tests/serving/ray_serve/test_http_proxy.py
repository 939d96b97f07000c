"""The middleware of Serve's HTTP proxy, before a replica has the request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from cluster.serving.ray_serve.http_proxy import SESSION_HEADER, ReplicaGuard
from cluster.serving.ray_serve.placement import RoutingKey
from cluster.serving.ray_serve.proxied_call import BODY_KEY, ProxiedCall, current_call
from tests.virtual_time import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp, Message


async def messages_of(
    app: ASGIApp,
    method: str,
    path: str,
    headers: Mapping[str, str | bytes],
    body: bytes = b"",
    *,
    guard: ReplicaGuard | None = None,
) -> list[Any]:
    """Return the ASGI messages that a client receives."""
    received: list[Any] = []  # Any: ASGI messages

    async def receive() -> Any:  # Any: see above
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:  # Any: see above
        received.append(message)

    raw = [
        (name.encode(), text if isinstance(text, bytes) else text.encode())
        for name, text in headers.items()
    ]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    await (guard or ReplicaGuard(app))(scope, receive, send)
    return received


async def keys_of(path: str, *requests: tuple[bytes, Mapping[str, str]]) -> list[RoutingKey]:
    """Return the routing keys that replicas receive for bodies and headers, from one proxy."""
    keys: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:  # Any: ASGI
        keys.extend(text for name, text in scope["headers"] if name == SESSION_HEADER.encode())
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = ReplicaGuard(app)
    for body, headers in requests:
        given = {"content-length": str(len(body)), **headers}
        await messages_of(app, "POST", path, given, body, guard=guard)
    return [RoutingKey.of_session_id(one.decode()) for one in keys]


@pytest.mark.parametrize(
    ("length", "is_read"),
    [("9", True), ("009", True), (" 9\t", True), ("300000", False), ("00000000300000", False)],
)
async def test_only_short_bodies_are_read_for_their_key(length: str, is_read: bool) -> None:
    keys = await keys_of("/v1/completions", (b'{"prompt": "hello"}', {"content-length": length}))
    assert len(keys) == is_read


async def key_of(body: bytes) -> str:
    """Return the text of the routing key that a body gets."""
    return (await keys_of("/v1/responses", (body, {})))[0].text


async def test_turns_of_responses_have_the_key_of_their_beginning_or_of_what_they_continue() -> (
    None
):
    begun = await key_of(b'{"input": [{"role": "user", "content": "a"}], "instructions": "b"}')
    later = b'{"role": "assistant", "content": "c"}, {"type": "function_call", "name": "d"}'
    body = b'{"input": [{"role": "user", "content": "a"}, %b], "instructions": "b"}' % later
    assert begun == await key_of(body)
    assert begun != await key_of(body.replace(b'"b"', b'"x"'))
    assert await key_of(b'{"input": "a"}') != await key_of(b'{"input": "b"}')
    kept = "resp_abcd1234_" + "0" * 32
    given = b'{"input": "a", "previous_response_id": "%b"}'
    assert await key_of(given % kept.encode()) == "replica-abcd1234"
    assert await key_of(given % b"resp_1") == await key_of(b'{"input": "a"}')


async def test_a_body_may_name_its_session() -> None:
    first, second = (b'{"session_id": "mine", "prompt": "%b"}' % text for text in (b"a", b"b"))
    assert await key_of(first) == await key_of(second) == "mine"
    header = {SESSION_HEADER: "other"}
    assert (await keys_of("/v1/completions", (first, header)))[0].text == "other"


@pytest.mark.parametrize("session", ["\u00e9", "\u65e5\u672c"])
async def test_a_body_may_name_its_session_in_any_script(session: str) -> None:
    body = b'{"session_id": "%b", "prompt": "a"}' % session.encode()
    assert await key_of(body) == session
    header = {SESSION_HEADER: session}
    assert (await keys_of("/v1/completions", (b'{"prompt": "a"}', header)))[0].text == session


@pytest.mark.parametrize(
    "name", ["x-request-id", SESSION_HEADER, "x-request-timeout-seconds", "x-other"]
)
async def test_headers_that_serve_reads_are_utf8(name: str) -> None:
    received: dict[bytes, bytes] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:  # Any: ASGI
        received.update(scope["headers"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    await messages_of(app, "GET", "/v1/models", {name: b"\xff"})
    text = received[name.encode()].partition(b"\n")[0]
    assert text == (b"\xff" if name == "x-other" else b"\xc3\xbf")


async def test_a_key_has_the_owner_of_the_credential() -> None:
    body = b'{"input": "a"}'
    headers = [
        {"authorization": "Bearer a"},
        {"authorization": "Bearer a", SESSION_HEADER: "mine"},
        {"x-api-key": "a"},
        {"authorization": "Bearer b"},
        {},
    ]
    first, session, *others = await keys_of("/v1/responses", *((body, one) for one in headers))
    assert session == RoutingKey("mine", first.owner)
    assert {one.text for one in others} == {first.text}
    owners = [first.owner, *(one.owner for one in others)]
    assert all(owners)
    assert len(set(owners)) == 4


async def test_a_body_that_is_longer_than_its_header_says_is_not_kept() -> None:
    part = b"x" * 2**17
    num_received = 0

    async def receive() -> Message:
        nonlocal num_received
        num_received += 1
        return {"type": "http.request", "body": part, "more_body": num_received < 64}

    async def app(scope: Any, receive: Any, send: Any) -> None:  # Any: ASGI
        assert BODY_KEY not in scope
        assert num_received <= 3
        num_bytes = 0
        has_more = True
        while has_more:
            message = await receive()
            num_bytes += len(message["body"])
            has_more = message["more_body"]
        assert num_bytes == 64 * len(part)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Message) -> None:
        pass

    headers = [(b"content-length", b"10"), (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    await ReplicaGuard(app)(scope, receive, send)


@in_virtual_time
async def test_a_body_that_arrives_slowly_is_left_to_the_replica() -> None:
    """It gets what has arrived first, and its own limit of time applies to the rest."""
    rest = asyncio.Event()
    parts = [b'{"prompt": ', b'"hello"}']

    async def receive() -> Message:
        if len(parts) == 1:
            await rest.wait()
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    received = b""

    async def app(scope: Any, receive: Any, send: Any) -> None:  # Any: ASGI
        nonlocal received
        assert BODY_KEY not in scope
        rest.set()
        received = (await receive())["body"] + (await receive())["body"]
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Message) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-length", b"19")],
    }
    async with asyncio.timeout(60.0):
        await ReplicaGuard(app)(scope, receive, send)
    assert received == b'{"prompt": "hello"}'


@pytest.mark.parametrize(
    ("headers", "num_sent"),
    [([(b"connection", b"close")], 4), ([], 1)],
    ids=["a replica without the body", "a client that does not read"],
)
async def test_only_a_call_whose_body_was_lost_is_sent_again(
    headers: list[tuple[bytes, bytes]], num_sent: int
) -> None:
    calls: list[ProxiedCall | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:  # Any: ASGI
        call = current_call()
        assert call is not None
        call.note_sent("one", may_continue=True)
        calls.append(call)
        await receive()
        await send({"type": "http.response.start", "status": 408, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    start, _ = await messages_of(app, "POST", "/v1/completions", {}, b"{}")
    assert (start["status"], len(calls)) == (408, num_sent)


async def read_all(receive: Any) -> None:  # Any: ASGI
    while (await receive())["more_body"]:
        pass


@in_virtual_time
async def test_what_arrives_after_the_response_is_not_kept() -> None:
    num_sent = 0
    kept: list[Message] = []

    async def receive() -> Message:
        nonlocal num_sent
        num_sent += 1
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x", "more_body": num_sent < 100}

    async def app(scope: Any, receive: Any, send: Any) -> None:  # Any: ASGI
        async def keep() -> Message:
            kept.append(await receive())
            return kept[-1]

        reading = asyncio.create_task(read_all(keep))
        await asyncio.sleep(0.095)
        headers = [(b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": b"too large"})
        await reading

    async def send(message: Message) -> None:
        return None

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await ReplicaGuard(app)(scope, receive, send)
    # Those before the response, and the end.
    assert (num_sent, len(kept)) == (100, 10)


@in_virtual_time
@pytest.mark.parametrize(
    ("num_sent", "received"), [(5, ["part"] * 5 + ["response"]), (3, ["part"] * 3 + ["response"])]
)
async def test_a_connection_is_closed_once_the_client_has_sent_its_body_or_pauses(
    num_sent: int, received: list[str]
) -> None:
    events: list[str] = []

    async def receive() -> Message:
        num_parts = events.count("part")
        if num_parts == num_sent:
            # The rest never comes.
            await asyncio.Event().wait()
        await asyncio.sleep(0.05)
        events.append("part")
        return {"type": "http.request", "body": b"x", "more_body": num_parts < 4}

    async def app(scope: Any, receive: Any, send: Any) -> None:  # Any: ASGI
        # As Serve's proxy receives what no replica reads.
        reading = asyncio.create_task(read_all(receive))
        headers = [(b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": b"too large"})
        reading.cancel()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            events.append("response")

    length = [(b"content-length", b"5000000")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": length}
    await ReplicaGuard(app)(scope, receive, send)
    assert events == received


@in_virtual_time
async def test_readiness_is_answered_while_no_replica_is_available() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:  # Any: ASGI
        # As Serve waits until a replica is available, and swallows the cancellation.
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    for path in ("/ready", "/app/health"):
        answering = asyncio.create_task(messages_of(app, "GET", path, {}))
        start, body = await answering
        assert (start["status"], b"error" in body["body"]) == (503, True)
    # A request may wait.
    waiting = asyncio.create_task(messages_of(app, "GET", "/v1/models", {}))
    await asyncio.wait((waiting,), timeout=600.0)
    assert not waiting.done()
    waiting.cancel()
    await waiting
