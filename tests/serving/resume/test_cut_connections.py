"""A connection that is cut after any byte of a stream loses nothing that can be resumed."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import re
import socket
import sys
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.slow_params import some_slow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.serving.conftest import Server

    _Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

__all__ = ["Answer", "ask", "cutting_proxy"]


class CuttingProxy:
    """Relays connections to a port of this host."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.has_cut = False
        """Whether the connection of `cut_next` was cut."""
        self._cut_after: int | None = None
        self._target = target

    def cut_next(self, num_bytes: int) -> None:
        """Cut the next connection after so many bytes to the client."""
        self._cut_after = num_bytes
        self.has_cut = False

    async def relay_connections(self, listener: socket.socket) -> None:
        """Relay all connections to a listening socket, until cancelled."""
        loop = asyncio.get_running_loop()
        # The group keeps tasks that nothing else refers to once a connection is lost. The stack
        # closes what a task was to relay that is cancelled before it begins.
        with ExitStack() as connections:
            async with asyncio.TaskGroup() as relays:
                while True:
                    connection, _ = await loop.sock_accept(listener)
                    relays.create_task(self._relay(connections.enter_context(connection)))

    async def _relay(self, connection: socket.socket) -> None:
        left, self._cut_after = self._cut_after, None
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._target)
            await self._relay_streams((reader, writer), upstream, left)
        finally:
            writer.close()

    async def _relay_streams(self, client: _Streams, server: _Streams, left: int | None) -> None:
        """Relay two connections; cut them after `left` bytes to the client."""
        (reader, writer), (server_reader, server_writer) = client, server
        up = asyncio.create_task(self._copy(reader, server_writer))
        try:
            while data := await server_reader.read(2**16):
                if left is not None and len(data) > left:
                    self.has_cut = True
                    writer.write(data[:left])
                    break
                if left is not None:
                    left -= len(data)
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            up.cancel()
            server_writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(2**16):
                writer.write(data)
            writer.transport.abort()


@asynccontextmanager
async def cutting_proxy(target: int | None) -> AsyncIterator[CuttingProxy]:
    """Run a proxy to a port."""
    assert target is not None
    proxy = CuttingProxy(target)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        proxy.port = listener.getsockname()[1]
        relaying = asyncio.create_task(proxy.relay_connections(listener))
        try:
            yield proxy
        finally:
            relaying.cancel()
            with suppress(asyncio.CancelledError):
                await relaying


@dataclass(frozen=True)
class Answer:
    """The part of a response that arrived."""

    status: int
    """0 if not even the head arrived."""
    events: list[tuple[int, str]]
    """The ids and the data of complete events."""
    is_complete: bool
    """Whether the response ended."""
    body: bytes = b""


# Any: JSON
async def ask(
    port: int | None,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    **headers: str,
) -> Answer:
    """Send a request on a connection of its own and read to the end of the connection."""
    content = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(content)}"]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join([*lines, "", ""]).encode() + content)
    received = b""
    try:
        while data := await reader.read(2**16):
            received += data
    except ConnectionError:
        pass
    finally:
        writer.close()
    return _answer(received)


def _answer(received: bytes) -> Answer:
    head, mark, rest = received.partition(b"\r\n\r\n")
    if not mark:
        return Answer(0, [], False)
    status = int(head.split()[1])
    if status == 204:
        return Answer(status, [], True)
    if b"content-length" in head:
        return Answer(status, [], True, rest)
    body, is_complete = _joined(rest)
    events = []
    for event in body.split(b"\n\n")[:-1]:
        number = 0
        for line in event.split(b"\n"):
            name, _, value = line.partition(b": ")
            if name == b"id":
                number = int(value)
            else:
                assert name == b"data"
                events.append((number, value.decode()))
    return Answer(status, events, is_complete, body)


def _joined(rest: bytes) -> tuple[bytes, bool]:
    """Return the content of chunks, and whether the last one is there."""
    body = b""
    while True:
        size, mark, rest = rest.partition(b"\r\n")
        if not mark:
            return body, False
        if size == b"0":
            return body, rest == b"\r\n"
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]


_WORKERS = 6
BODIES: dict[str, dict[str, Any]] = {  # Any: JSON
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
OPTIONS = {"include_usage": True, "resumable": True}
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
CONNECTION_ERRORS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def cut_everywhere(
    port: int | None, run: Callable[[CuttingProxy, str], Awaitable[object]], step: int
) -> int:
    """Run with connections cut after 0, `step`, 2 * `step`, ... bytes; return the last number.

    All must return the same.
    """
    numbers = itertools.count(0, step)
    is_cut = True

    async def work(wanted: object) -> None:
        nonlocal is_cut
        async with cutting_proxy(port) as proxy:
            while is_cut:
                num_bytes = next(numbers)
                proxy.cut_next(num_bytes)
                assert await run(proxy, f"cut-{num_bytes}-{step}") == wanted
                is_cut &= proxy.has_cut

    async with cutting_proxy(port) as proxy:
        wanted = await run(proxy, f"whole-{step}")
    await asyncio.gather(*(work(wanted) for _ in range(_WORKERS)))
    return next(numbers) - _WORKERS * step


def body_of(path: str) -> dict[str, Any]:  # Any: JSON
    return {
        "model": "tiny", "max_tokens": 3, "stream": True, "stream_options": OPTIONS, **BODIES[path]
    }  # fmt: skip


async def resumed_events(proxy: CuttingProxy, server: Server, path: str, name: str) -> list[str]:
    """Return the data of a stream's events, read through the proxy and then without it."""
    found: list[tuple[int, str]] = []
    answer = await ask(proxy.port, "POST", path, body_of(path), x_request_id=name)
    port = server.frontends.http_port
    while True:
        assert answer.status in (0, 200, 204), answer.body
        found += answer.events
        if answer.is_complete:
            break
        answer = await ask(port, "GET", f"/v1/streams/{name}", last_event_id=str(len(found)))
    assert [number for number, _ in found] == list(range(1, len(found) + 1))
    return [data for _, data in found]


def contents(events: list[str]) -> tuple[str, Any, Any]:  # Any: JSON
    """Return the text, the finish reason and the usage that events report."""
    assert events[-1] == "[DONE]"
    *chunks, last = [json.loads(event) for event in events[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices]
    return "".join(texts), choices[-1]["finish_reason"], last["usage"]


# Parts of most lines have more bytes than a step.
STEPS = pytest.mark.parametrize("step", some_slow([3, 1], slow=[1]))


@STEPS
@pytest.mark.parametrize(
    "path", ["/v1/completions", pytest.param("/v1/chat/completions", marks=pytest.mark.slow)]
)
async def test_events_of_a_stream_cut_at_every_byte_are_equal(
    server: Server, path: str, step: int
) -> None:
    async def run(proxy: CuttingProxy, name: str) -> object:
        return contents(await resumed_events(proxy, server, path, f"{name}-{path[4:]}"))

    assert await cut_everywhere(server.frontends.http_port, run, step) > 700
    assert server.engine.log.aborted == []


async def resumed_messages(
    proxy: CuttingProxy,
    stub: Any,  # Any: the generated stub is not async to mypy
    name: str,
) -> list[pb.GenerateResponse]:
    """Return the messages of a stream, read through the proxy and then with the stub."""
    sampling = pb.SamplingParams(max_tokens=3)
    first = pb.GenerateRequest(text="x", sampling=sampling, request_id=name, resumable=True)
    found: list[pb.GenerateResponse] = []
    target = f"127.0.0.1:{proxy.port}"
    async with grpc.aio.insecure_channel(target, CHANNEL_OPTIONS) as channel:
        cut: Any = pagedray_pb2_grpc.GenerationServiceStub(channel)  # Any: as above
        try:
            async for message in cut.Generate(first):
                found.append(message)  # noqa: PERF401  # kept when the stream is cut
        except grpc.aio.AioRpcError as error:
            if error.code() not in CONNECTION_ERRORS:
                raise
            rest = pb.GenerateRequest(request_id=name, resume_from=len(found))
            try:
                found += [message async for message in stub.Generate(rest)]
            except grpc.aio.AioRpcError as missing:
                if found or missing.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                # The request did not arrive.
                found = [message async for message in stub.Generate(first)]
    assert [message.number for message in found] == list(range(1, len(found) + 1))
    return found


def text_of(messages: list[pb.GenerateResponse]) -> tuple[str, list[int], int]:
    """Return text, tokens and finish reason."""
    sequences = [sequence for message in messages for sequence in message.sequences]
    assert messages[-1].usage.num_generated_tokens == 3
    return (
        "".join(sequence.text for sequence in sequences),
        [token_id for sequence in sequences for token_id in sequence.token_ids],
        sequences[-1].finish_reason,
    )


@STEPS
async def test_messages_of_a_stream_cut_at_every_byte_are_equal(server: Server, step: int) -> None:
    async with grpc.aio.insecure_channel(server.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)

        async def run(proxy: CuttingProxy, name: str) -> object:
            return text_of(await resumed_messages(proxy, stub, name))

        assert await cut_everywhere(server.frontends.grpc_port, run, step) > 200
    assert server.engine.log.aborted == []


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
    writer.close()


async def test_no_relay_is_collected_before_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    async with server, cutting_proxy(server.sockets[0].getsockname()[1]) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"x")
        assert await reader.read(1) == b"x"
        writer.close()
        for _ in range(6):
            gc.collect()
            await asyncio.sleep(0)
    assert caplog.messages == []


DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "streams.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
ADDRESSES = ("127.0.0.1:8000", "127.0.0.1:9000")


# Cut before the head or the first message has arrived, and within the text.
@pytest.mark.parametrize("num_bytes", [pytest.param(10, marks=pytest.mark.slow), 1500])
@pytest.mark.parametrize("place", [0, 1])
async def test_program_of_the_document_survives_cuts(
    server: Server, place: int, num_bytes: int
) -> None:
    frontends = server.frontends
    wanted = await asyncio.to_thread(
        httpx.post,
        f"{server.url}/v1/completions",
        json={"model": "tiny", "prompt": "def parse_date(text):", "max_tokens": 64},
    )
    server.engine.step_s = 0.003
    async with cutting_proxy((frontends.http_port, frontends.grpc_port)[place]) as proxy:
        program = PROGRAMS[place].replace(ADDRESSES[place], f"127.0.0.1:{proxy.port}")
        proxy.cut_next(num_bytes)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program.replace("tiny-llama", "tiny"),
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0
    assert proxy.has_cut
    assert printed.decode() == wanted.json()["choices"][0]["text"] + "\n"
