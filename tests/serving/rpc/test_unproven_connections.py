"""Connections that send much without a valid call are stopped, and no others."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.serving.auth.authenticator import Authenticator
from cluster.serving.connections.connection_limits import ConnectionLimits
from cluster.serving.rpc.connection_watch import ConnectionWatch
from cluster.serving.rpc.open_sockets import num_received_bytes
from cluster.serving.rpc.proven_connections import ProvenConnections, peer_name
from cluster.serving.rpc.unproven_share import UnprovenShare
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.fakes import wait_for
from tests.hostile.http2 import (
    ACK,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    call_headers,
    frame,
)
from tests.load.tenant_keys import write_keys
from tests.serving.grpc_frontend import grpc_frontend
from tests.serving.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.serving.text.tokenizer import Tokenizer

GENERATE = "/pagedray.v1.GenerationService/Generate"
PINGS = frame(PING, ACK, 0, bytes(8)) * 4096
_STALLED_AFTER_S = 4.0
START = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0)


def calls(number: int) -> bytes:
    """Return calls without a key, of about 300 bytes each."""
    block = call_headers(GENERATE, {"x": "a" * 150})
    streams = range(1, 2 * number, 2)
    return b"".join(frame(HEADERS, END_HEADERS | END_STREAM, one, block) for one in streams)


async def is_closed(target: str, sent: bytes, within_s: float) -> bool:
    """Return whether the server closes a connection that sends this."""
    reader, writer = await connected(target)
    try:
        writer.write(START + sent)
        async with asyncio.timeout(within_s):
            while await reader.read(2**16):
                pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    finally:
        writer.close()
    return True


async def is_stalled(writer: asyncio.StreamWriter, within_s: float) -> bool:
    """Return whether the server takes no more of a connection that it does not close."""
    end_s = asyncio.get_running_loop().time() + within_s
    num_sent = 0
    while asyncio.get_running_loop().time() < end_s:
        writer.write(PINGS)
        num_sent += len(PINGS)
        try:
            async with asyncio.timeout(_STALLED_AFTER_S):
                await writer.drain()
        except TimeoutError:
            return True
    return False


async def connected(target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = target.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_first_connections_that_send_much_without_a_key_are_stalled_and_others_closed(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    write_keys(path, "ann")
    with caplog.at_level(logging.WARNING):
        async with grpc_frontend(tokenizer, authenticator=Authenticator(path)) as frontend:
            writers = [(await connected(frontend.target))[1] for _ in range(8)]
            for writer in writers:
                writer.write(START)
            assert all(await asyncio.gather(*(is_stalled(one, 60.0) for one in writers)))
            assert await is_closed(frontend.target, calls(400), 60.0)
            assert not await is_closed(frontend.target, calls(20), 0.5)
            for writer in writers:
                # What waits to be sent never will be.
                writer.transport.abort()
            await asyncio.sleep(0.1)
    assert len([record for record in caplog.records if "valid call" in record.message]) == 1


def test_stalled_connection_loses_nothing_if_a_valid_call_begins_late() -> None:
    proven, sent = ProvenConnections(), b"a" * 200_000
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        watch = ConnectionWatch(port, ConnectionLimits(), proven)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(sent)
            server, peer = listener.accept()
            with server:
                wait_for(lambda: num_received_bytes(server.fileno()) > 2**16)
                watch.close_excess()
                watch.close_excess()
                num_before = num_received_bytes(server.fileno())
                client.sendall(b"b")
                time.sleep(0.1)
                assert num_received_bytes(server.fileno()) == num_before
                proven.add(peer_name(*peer))
                watch.close_excess()
                server.settimeout(60.0)
                received = b""
                while len(received) <= len(sent):
                    received += server.recv(2**16)
                assert received == sent + b"b"


async def test_connection_with_a_valid_call_may_send_much(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    metadata = (("authorization", f"Bearer {write_keys(path, 'ann')['ann']}"),)
    with caplog.at_level(logging.WARNING):
        async with (
            grpc_frontend(tokenizer, authenticator=Authenticator(path)) as frontend,
            grpc.aio.insecure_channel(frontend.target) as channel,
        ):
            # Any: the generated stub is not async to mypy.
            stub: Any = pagedray_pb2_grpc.GenerationServiceStub(channel)
            for _ in range(3):
                # The text is too long, but the key is valid.
                request = pb.TokenizeRequest(text="a b " * 16_000)
                await stub.Tokenize(request, metadata=metadata).code()
                # Connections are looked at ten times a second.
                await asyncio.sleep(0.3)
    assert [record.message for record in caplog.records] == []


async def test_many_health_checks_may_share_a_connection(tokenizer: Tokenizer) -> None:
    async with (
        grpc_frontend(tokenizer) as frontend,
        grpc.aio.insecure_channel(frontend.target) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)  # Any: see above
        for _ in range(300):
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=60.0)


def test_closed_connections_are_forgotten_at_the_second_look() -> None:
    proven = ProvenConnections()
    proven.add("ipv4:192.0.2.1:1")
    proven.add("ipv4:192.0.2.1:2")
    for _ in range(2):
        assert "ipv4:192.0.2.1:2" in proven
        proven.forget_closed({"ipv4:192.0.2.1:1"})
    assert "ipv4:192.0.2.1:1" in proven
    assert "ipv4:192.0.2.1:2" not in proven


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_peers_have_the_names_that_grpc_gives_them(host: str) -> None:
    names: list[str] = []

    async def handle(_request: object, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        names.append(context.peer())
        return b""

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(handle)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", {"C": method}),))
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
        await channel.unary_unary("/a.B/C")(b"", timeout=60.0)  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
    await server.stop(0)
    client_port = int(names[0].rpartition(":")[2])
    assert names == [peer_name(host.strip("[]"), client_port)]


async def test_a_defect_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    class Defective(ConnectionWatch):
        num_looks = 0

        def close_excess(self) -> None:
            self.num_looks += 1
            raise RuntimeError("can't start new thread")

    watch = Defective(1, ConnectionLimits(), ProvenConnections())
    watching = asyncio.create_task(watch.watch())
    await wait_until(lambda: watch.num_looks >= 2)
    watching.cancel()
    assert [record.message for record in caplog.records] == [
        "gRPC connections could not be checked."
    ]


def test_newest_connections_end_if_a_host_sends_much_on_many() -> None:
    # All that a host may send, and eight stalled connections.
    num_kept = 2**21 // 15_000 + 8
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener, ExitStack() as stack:
        port = listener.getsockname()[1]
        watch = ConnectionWatch(port, ConnectionLimits(), ProvenConnections())
        # Those that one look finds first are of one age, in whatever order their descriptors are.
        older = [_accepted(listener, stack, sent=bytes(15_000)) for _ in range(num_kept)]
        for _ in range(2):
            watch.close_excess()
        newer = [_accepted(listener, stack, sent=bytes(15_000)) for _ in range(50)]
        for _ in range(2):
            watch.close_excess()
        assert [_is_ended(one) for one in older] == [False] * num_kept
        assert [_is_ended(one) for one in newer] == [True] * 50


def test_a_look_at_many_connections_takes_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    own = threading.get_ident()
    # Threads of earlier tests may sleep as well.
    monkeypatch.setattr(
        time,
        "sleep",
        lambda seconds: slept_s.append(seconds) if threading.get_ident() == own else None,
    )
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener, ExitStack() as stack:
        port = listener.getsockname()[1]
        for _ in range(400):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            stack.enter_context(listener.accept()[0])
        watch = ConnectionWatch(port, ConnectionLimits(), ProvenConnections())
        watch.close_excess()
        del slept_s[:]
        watch.close_excess()
    assert len(slept_s) >= 2


def _accepted(listener: socket.socket, stack: ExitStack, sent: bytes) -> socket.socket:
    """Return the server's end of another connection, which has received what was sent."""
    client = stack.enter_context(socket.create_connection(listener.getsockname()))
    client.sendall(sent)
    accepted = stack.enter_context(listener.accept()[0])
    wait_for(lambda: num_received_bytes(accepted.fileno()) == len(sent))
    return accepted


def _is_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while received := len(connection.recv(2**16)):
            assert received
    except BlockingIOError:
        return False
    return True


def test_connections_without_a_valid_call_have_limits() -> None:
    share = UnprovenShare()
    hosts = [f"192.0.2.{number}" for number in range(5)]
    # Each host may have 128 of the largest headers, and two of them fill the memory for all.
    assert [sum(share.admits(one, 2**14) for _ in range(200)) for one in hosts] == [
        128, 128, 0, 0, 0,
    ]  # fmt: skip
    # A host's first connections, as those of a new client, have room.
    assert sum(share.admits("192.0.2.9", 500) for _ in range(600)) == 512
