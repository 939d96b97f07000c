"""Connections of frontends: their number, their sockets, and certificates that are renewed."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.serving.engine_client import EngineClient
from cluster.serving.frontend_options import FrontendOptions
from cluster.serving.frontends import Frontends
from cluster.serving.http.server import HttpServer
from cluster.serving.http_app import build_http_app
from cluster.serving.listener import (
    ConnectionLimits,
    check_ports,
    connection_limits,
    free_port,
    listen,
)
from cluster.serving.rpc.server import GrpcServer
from cluster.serving.servicer import Servicer
from cluster.serving.tls import CertificateStore, TlsFiles, certificate_store
from pagedray.errors import DeviceError, StartupError
from tests.serving.certificates import Authority
from tests.serving.conftest import engine_config, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from cluster.serving.text.tokenizer import Tokenizer

AUTHORITY = Authority()


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    AUTHORITY.issue().write(tmp_path)
    return TlsFiles(certificate=tmp_path / "tls.crt", key=tmp_path / "tls.key")


def test_expiry_is_the_certificates(files: TlsFiles) -> None:
    store = CertificateStore(files)
    assert store.current().certificate == files.certificate.read_bytes()
    assert store.current().expires.endswith("GMT")
    assert not store.needs_client_certificate


def test_missing_file_is_named(files: TlsFiles) -> None:
    files.key.unlink()
    with pytest.raises(StartupError, match=f"The TLS key {files.key} cannot be read: No such file"):
        CertificateStore(files)


def test_key_of_another_certificate_is_rejected(files: TlsFiles) -> None:
    files.key.write_bytes(AUTHORITY.issue().key)
    with pytest.raises(StartupError, match="cannot be used: key values mismatch"):
        CertificateStore(files)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x00" * 100])
def test_file_that_is_not_pem_is_rejected(files: TlsFiles, content: bytes) -> None:
    files.certificate.write_bytes(content)
    with pytest.raises(StartupError, match=f"The TLS certificate {files.certificate}"):
        CertificateStore(files)


def test_expired_certificate_is_rejected(files: TlsFiles) -> None:
    AUTHORITY.issue(num_days=-1).write(files.certificate.parent)
    with pytest.raises(StartupError, match="certificate has expired"):
        CertificateStore(files)


def test_client_ca_must_be_an_authority(files: TlsFiles, tmp_path: Path) -> None:
    ca = tmp_path / "ca.crt"
    with_ca = TlsFiles(certificate=files.certificate, key=files.key, client_ca=ca)
    for content in (b"", b"nonsense"):
        ca.write_bytes(content)
        with pytest.raises(StartupError, match=f"The TLS client CA {ca} cannot be used"):
            CertificateStore(with_ca)
    # That of a server signs no others.
    ca.write_bytes(files.certificate.read_bytes())
    with pytest.raises(StartupError, match=f"{ca} contains no certificate authority"):
        CertificateStore(with_ca)
    ca.write_bytes(AUTHORITY.certificate)
    assert CertificateStore(with_ca).needs_client_certificate


def test_renewed_files_are_loaded(files: TlsFiles, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = CertificateStore(files)
    before = store.current()
    assert store.current() is before
    renewed = AUTHORITY.issue()
    renewed.write(files.certificate.parent)
    assert store.current().certificate == renewed.certificate
    assert "Reloaded the TLS certificate, which expires" in caplog.text


def test_broken_renewal_keeps_the_certificate_and_is_logged_once(
    files: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    store = CertificateStore(files)
    before = store.current()
    renewed = AUTHORITY.issue()
    files.certificate.write_bytes(renewed.certificate)
    for _ in range(3):
        assert store.current() is before
    assert caplog.text.count("Keeping the TLS certificate in use") == 1
    files.certificate.unlink()
    assert store.current() is before
    renewed.write(files.certificate.parent)
    assert store.current().key == renewed.key


async def _subject(port: int, context: ssl.SSLContext) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        # The server speaks first, so that the client sees its certificate rejected.
        if await reader.read(2) != b"ok":
            raise ConnectionError("The server hung up.")
        shown = writer.get_extra_info("peercert")
    finally:
        writer.transport.abort()
    return str(dict(part[0] for part in shown["subject"])["commonName"])


async def _listen(store: CertificateStore) -> asyncio.Server:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"ok")
        await reader.read()
        writer.close()

    return await asyncio.start_server(greet, "127.0.0.1", 0, ssl=store.server_context)


async def test_open_context_presents_the_current_certificate(files: TlsFiles) -> None:
    trusting = ssl.create_default_context(cadata=AUTHORITY.certificate.decode())
    async with await _listen(CertificateStore(files)) as server:
        port = server.sockets[0].getsockname()[1]
        assert await _subject(port, trusting) == "server"
        AUTHORITY.issue("renewed").write(files.certificate.parent)
        assert await _subject(port, trusting) == "renewed"
        files.key.write_bytes(b"broken")
        assert await _subject(port, trusting) == "renewed"


async def test_client_of_another_authority_is_rejected(files: TlsFiles, tmp_path: Path) -> None:
    ca = tmp_path / "ca.crt"
    ca.write_bytes(AUTHORITY.certificate)
    store = CertificateStore(TlsFiles(certificate=files.certificate, key=files.key, client_ca=ca))
    other = Authority("another authority")
    async with await _listen(store) as server:
        port = server.sockets[0].getsockname()[1]
        good = _client(AUTHORITY, tmp_path / "good")
        assert await _subject(port, good) == "server"
        for bad in (_client(other, tmp_path / "bad"), _client(None, tmp_path / "none")):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await _subject(port, bad)
        # The authority is replaced: clients of the old one are rejected.
        ca.write_bytes(other.certificate)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await _subject(port, good)
        assert await _subject(port, _client(other, tmp_path / "now good")) == "server"


def _client(authority: Authority | None, folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=AUTHORITY.certificate.decode())
    if authority is not None:
        folder.mkdir()
        authority.issue("client").write(folder)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


@pytest.mark.parametrize(
    ("names", "missing"),
    [(("tls.crt", None, None), "--tls-key"), ((None, "tls.key", None), "--tls-cert"),
     ((None, None, "ca.crt"), "--tls-cert")],
)  # fmt: skip
def test_incomplete_set_of_files_is_rejected(
    tmp_path: Path, names: tuple[str | None, ...], missing: str
) -> None:
    certificate, key, ca = (None if name is None else tmp_path / name for name in names)
    with pytest.raises(StartupError, match=f"TLS requires {missing} as well."):
        certificate_store(certificate, key, ca)


def test_without_files_tls_is_disabled() -> None:
    assert certificate_store(None, None, None) is None


async def test_http_frontend_speaks_tls(files: TlsFiles, tokenizer: Tokenizer) -> None:
    client = EngineClient(asyncio.get_running_loop())
    certificates = certificate_store(files.certificate, files.key, None)
    frontends = Frontends(
        client,
        tokenizer,
        engine_config(),
        FrontendOptions(host="127.0.0.1", grpc_port=None, http_port=0),
        certificates=certificates,
    )
    await frontends.start_servers()
    try:
        trusting = ssl.create_default_context(cadata=AUTHORITY.certificate.decode())
        for name in ("server", "renewed"):
            AUTHORITY.issue(name).write(files.certificate.parent)
            async with httpx.AsyncClient(verify=trusting) as http:
                answer = await http.get(f"https://127.0.0.1:{frontends.http_port}/version")
            stream = answer.extensions["network_stream"]
            assert answer.status_code == 200
            shown = stream.get_extra_info("ssl_object").getpeercert()
            assert dict(part[0] for part in shown["subject"])["commonName"] == name
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"http://127.0.0.1:{frontends.http_port}/version")
    finally:
        await frontends.stop_servers(0)


LIMITS = ConnectionLimits(total=8)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@pytest.fixture
async def servicer(tokenizer: Tokenizer) -> AsyncIterator[Servicer]:
    client = EngineClient(asyncio.get_running_loop())
    servicer = Servicer(client, tokenizer, engine_config())
    servicer.set_ready()
    yield servicer
    await servicer.close()


async def occupy(stack: ExitStack, port: int, num: int, first: bytes = b"") -> list[socket.socket]:
    """Open idle connections from another host than 127.0.0.1."""
    loop = asyncio.get_running_loop()
    connections = []
    for _ in range(num):
        connection = stack.enter_context(socket.socket())
        connection.bind(("127.0.0.2", 0))
        connection.setblocking(False)
        with suppress(OSError):
            await loop.sock_connect(connection, ("127.0.0.1", port))
            connection.send(first)
        connections.append(connection)
    return connections


async def num_alive(connections: list[socket.socket]) -> int:
    """Return how many connections the server has not closed."""
    number = 0
    for connection in connections:
        try:
            while connection.recv(4096):
                pass
        except BlockingIOError:
            number += 1
        except OSError:
            pass
    return number


async def until_alive(connections: list[socket.socket], number: int) -> None:
    async with asyncio.timeout(60.0):
        while await num_alive(connections) != number:
            await asyncio.sleep(0.05)


async def test_http_connections_are_bounded(
    servicer: Servicer, caplog: pytest.LogCaptureFixture
) -> None:
    server = HttpServer(build_http_app(servicer), host="127.0.0.1", port=0, limits=LIMITS)
    await server.start_server()
    try:
        with ExitStack() as stack, caplog.at_level(logging.WARNING):
            connections = await occupy(stack, server.port, 100)
            await until_alive(connections, LIMITS.total)
        assert len(caplog.records) == 1
        # Closed connections no longer count.
        assert server._server is not None
        open_connections = server._server.server_state.connections
        await wait_until(lambda: not open_connections)
        async with httpx.AsyncClient(timeout=60.0) as client:
            url = f"http://127.0.0.1:{server.port}/version"
            assert (await client.get(url)).status_code == 200
    finally:
        await server.stop_server()


async def test_old_grpc_connections_take_no_more_calls_and_keep_theirs(
    servicer: Servicer,
) -> None:
    limits = ConnectionLimits(age_s=0.2)
    server = GrpcServer(servicer, host="127.0.0.1", port=0, limits=limits)
    await server.start_server()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            # Any: the stub is not async to mypy.
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(PREFACE)
            async with asyncio.timeout(60.0):
                # The reason that the last frame gives.
                await reader.readuntil(b"max_age")
            writer.close()
            await server.set_serving(True)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await server.stop_server(0.1)


@pytest.mark.parametrize("limit", [64, 256, 1024, 20_000])
def test_descriptors_are_left_for_everything_else(limit: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        limits = connection_limits()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert 2 * limits.total <= limit - min(128, limit // 2)
    assert limits.total > 0


def test_connections_inherit_tcp_nodelay() -> None:
    with (
        listen("HTTP", "127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        listener.setblocking(True)
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize(("frontend", "flag"), [("HTTP", "--http-port"), ("gRPC", "--grpc-port")])
def test_a_port_in_use_is_named_with_its_flag(frontend: str, flag: str) -> None:
    with listen(frontend, "127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(DeviceError, match=rf"port {port} .* already in use; .* {flag}\.$"):
            listen(frontend, "127.0.0.1", port)


def test_the_reason_of_the_system_is_given_once() -> None:
    # An address of TEST-NET-1, which no machine has.
    with pytest.raises(DeviceError) as raised:
        listen("HTTP", "192.0.2.1", 8000)
    assert str(raised.value).count("192.0.2.1") == 1


def test_the_next_free_port_is_neither_in_use_nor_another_frontends() -> None:
    with listen("gRPC", "127.0.0.1", 0) as listener:
        used = listener.getsockname()[1]
        found = free_port("gRPC", "127.0.0.1", used, other=0)
        assert found > used
        assert free_port("gRPC", "127.0.0.1", used, other=found) > found
        check_ports("127.0.0.1", {"gRPC": found, "HTTP": 0})
        with pytest.raises(DeviceError, match=rf"^HTTP port {used} of .* with --http-port\.$"):
            check_ports("127.0.0.1", {"gRPC": found, "HTTP": used})
