"""Health checks that are answered without opening their connection, as the application would."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import time
from typing import TYPE_CHECKING

import httptools
import pytest

from cluster.serving.engine_client import EngineClient
from cluster.serving.http.allowed_hosts import AllowedHosts
from cluster.serving.http.quick_checks import QuickChecks
from cluster.serving.http_app import build_http_app
from cluster.serving.servicer import Servicer
from tests.serving.conftest import Server, engine_config

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer

_CHECK = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
_KUBELET = (
    b"GET /ready HTTP/1.1\r\nHost: 10.0.0.7:8000\r\nUser-Agent: kube-probe/1.34\r\n"
    b"Accept: */*\r\nConnection: close\r\n\r\n"
)


def answered(received: bytes) -> list[tuple[str, str]]:
    """Return the paths and hosts for which a response is made to what was received."""
    found: list[tuple[str, str]] = []

    def passes(path: str, host: str) -> bool:
        found.append((path, host))
        return True

    response = QuickChecks(passes, lambda: [(b"date", b"Thu")]).response_to(received)
    assert (response is not None) == bool(found)
    return found


def test_whole_checks_are_answered() -> None:
    assert answered(_CHECK) == [("/health", "127.0.0.1")]
    assert answered(_KUBELET) == [("/ready", "10.0.0.7:8000")]
    assert answered(_CHECK.replace(b"Connection: close", b"connection: Close"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\r\n\r\n", b"\r\n"),
        (b"\r\n\r\n", b"\r\n\r\nGET"),
        (b"\r\n\r\n", b"\n\n"),
        (b"GET", b"POST"),
        (b"GET", b" GET"),
        (b"/health", b"/health?a=b"),
        (b"/health", b"//health"),
        (b"/health", b"http://x/health"),
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"Host: 127.0.0.1\r\n", b""),
        (b"Host", b"Host : x\r\nAccept"),
        (b"Host", b"Host: x\r\nHost"),
        (b"Host", b"Host: x\r\n Accept"),
        (b"Host", b"Origin: http://x\r\nHost"),
        (b"Host", b"Content-Length: 1\r\nHost"),
        (b"Host", b"Transfer-Encoding: chunked\r\nHost"),
        (b"Host", b"Expect: 100-continue\r\nHost"),
        (b"Host", b"X-Request-Id: 1\r\nHost"),
        (b"127.0.0.1", b"\xff"),
        (b"127.0.0.1", b"a" * 1024),
        (b"Connection: close\r\n", b""),
        (b"close", b"keep-alive"),
        (b"close", b"close, upgrade"),
    ],
)
def test_all_else_is_left_to_the_application(old: bytes, new: bytes) -> None:
    assert not answered(_CHECK.replace(old, new, 1))


class _Read:
    """What httptools reads."""

    def __init__(self, received: bytes) -> None:
        self.url = b""
        self.hosts: list[bytes] = []
        self.keeps_alive: list[bool] = []
        """Of each complete request."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(received)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"host":
            self.hosts.append(value)

    def on_message_complete(self) -> None:
        self.keeps_alive.append(self.parser.should_keep_alive())


def test_the_parser_reads_the_same_in_what_is_answered() -> None:
    rng = random.Random(12)
    num_answered = 0
    for _ in range(20_000):
        received = bytearray(rng.choice((_CHECK, _KUBELET)))
        for _ in range(rng.randrange(3)):
            place = rng.randrange(len(received))
            received[place : place + rng.randrange(3)] = rng.choice(
                (b"\r", b"\n", b" ", b"\t", b":", b"\0", b"a", b"A", b"\x80", b"\r\n", b"\r\n\r\n")
            )
        for path, host in answered(bytes(received)):
            num_answered += 1
            read = _Read(bytes(received))
            assert (read.url, read.hosts) == (path.encode(), [host.encode()])
            assert (read.parser.get_method(), read.keeps_alive) == (b"GET", [False])
    assert num_answered > 1000


def exchange(server: Server, request: bytes, *, is_whole: bool) -> bytes:
    """Return the response without its date to a request that is sent at once or in two parts."""
    with socket.create_connection(("127.0.0.1", server.frontends.http_port or 0), 60) as client:
        if not is_whole:
            client.sendall(request[:9])
            time.sleep(0.02)
            request = request[9:]
        client.sendall(request)
        received = b""
        while chunk := client.recv(2**16):
            received += chunk
    return re.sub(rb"\r\ndate: [^\r]+ GMT", b"", received)


@pytest.mark.parametrize("path", [b"/health", b"/ready", b"/ping", b"/nothing", b"/v1/models"])
@pytest.mark.parametrize("host", [b"127.0.0.1", b"evil.example"])
def test_responses_equal_those_of_the_application(server: Server, path: bytes, host: bytes) -> None:
    request = _CHECK.replace(b"/health", path).replace(b"127.0.0.1", host)
    whole = exchange(server, request, is_whole=True)
    assert whole == exchange(server, request, is_whole=False)
    if host == b"evil.example":
        assert whole.startswith(b"HTTP/1.1 421 ")


async def test_checks_that_do_not_succeed_are_for_the_application(tokenizer: Tokenizer) -> None:
    client = EngineClient(asyncio.get_running_loop())
    servicer = Servicer(client, tokenizer, engine_config())
    app = build_http_app(servicer, allowed_hosts=AllowedHosts())
    paths = ("/health", "/ping", "/ready", "/v1/models", "/nothing")
    assert not any(app.passes_check(path, "10.0.0.7") for path in paths)
    servicer.set_ready()
    assert [path for path in paths if app.passes_check(path, "10.0.0.7")] == ["/health", "/ping"]
    assert not any(app.passes_check(path, "evil.example") for path in paths)
