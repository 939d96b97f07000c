"""Attacks by HTTP connections: heads and bodies that do not end, and requests without a key."""

from __future__ import annotations

import selectors
import socket
import time
from collections import Counter
from contextlib import ExitStack, suppress

from tests.hostile.attack import Attack, Findings, Target
from tests.hostile.floods import HttpFlood
from tests.hostile.http2 import HEADERS, PREFACE, SETTINGS, call_headers, frame

__all__ = ["CONNECTION_ATTACKS"]

_PAGE = "https://page.example"


def _preflight(origin: str, num_headers: int) -> bytes:
    return (
        b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\nOrigin: %b\r\n"
        b"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: %b\r\n\r\n"
        % (origin.encode(), b",".join([b"x-a"] * num_headers))
    )


def _allowed_preflight(key: str | None) -> bytes:
    """Return a preflight with as many headers as an answer repeats."""
    return _preflight(_PAGE, 512)


def _other_preflight(key: str | None) -> bytes:
    return _preflight("https://evil.example", 4000)


def _keyless(key: str | None) -> bytes:
    return b"GET /loads HTTP/1.1\r\nHost: x\r\n\r\n"


def _many_headers(key: str | None) -> bytes:
    """Return a head of just less than 64 KiB."""
    return b"GET /loads HTTP/1.1\r\nHost: x\r\n%b\r\n" % (b"a:\r\n" * 12_900)


def _health_check(key: str | None) -> bytes:
    """Return the first request of a connection, which the server closes."""
    return b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def _small_chunks(key: str | None) -> bytes:
    """Return a body that goes on after the request was rejected."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"1\r\nx\r\n" * 200_000


class _HeldHeads(Attack):
    """63 KiB of a head on each of thousands of connections, without a key."""

    def run(self, target: Target, seconds: float) -> Findings:
        """Open connections for half of the time, and hold them for the rest."""
        began_s = time.monotonic()
        begun = b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * (63 * 2**10)
        with ExitStack() as stack:
            num_opened = 0
            while num_opened < 3000 and time.monotonic() < began_s + seconds / 2:
                connection = socket.create_connection(("127.0.0.1", target.http_port), 10.0)
                stack.enter_context(connection).settimeout(2.0)
                num_opened += 1
                with suppress(OSError):
                    connection.sendall(begun)
            time.sleep(max(0.0, began_s + seconds - time.monotonic()))
        return Findings(figures={"connections": num_opened})


class _IdleConnections(Attack):
    """More connections than the server has descriptors, from one address, which say nothing."""

    def run(self, target: Target, seconds: float) -> Findings:
        """Open the connections, in turns to both frontends, and keep them open."""
        end_s = time.monotonic() + seconds
        with ExitStack() as stack:
            connections = []
            for index in range(2200):
                port = target.http_port if index % 2 else target.grpc_port
                connection = stack.enter_context(socket.socket())
                # The whole of 127.0.0.0/8 is the loopback.
                connection.bind(("127.0.0.2", 0))
                connection.settimeout(max(0.1, end_s - time.monotonic()))
                with suppress(OSError):
                    connection.connect(("127.0.0.1", port))
                    connection.send(b"" if index % 2 else PREFACE + frame(SETTINGS, 0, 0))
                    connections.append(connection)
            time.sleep(max(0.0, end_s - time.monotonic()))
            num_open = sum(map(_is_open, connections))
        return Findings(figures={"tried": 2200, "open at the end": num_open})


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


_SLOW_HTTP = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: " + b"a" * 4000
_SLOW_GRPC = (
    PREFACE
    + frame(SETTINGS, 0, 0)
    + frame(HEADERS, 0, 1, call_headers("/grpc.health.v1.Health/Check", {"x": "a" * 4000}))
)


class _SlowHeads(Attack):
    """A byte of each head at a time, on both frontends (slowloris)."""

    def run(self, target: Target, seconds: float) -> Findings:
        """Send to all connections in turns."""
        end_s = time.monotonic() + seconds
        with ExitStack() as stack:
            connections = []
            for index in range(200):
                port = target.http_port if index % 2 else target.grpc_port
                connection = socket.create_connection(("127.0.0.1", port), 10.0)
                head = _SLOW_HTTP if index % 2 else _SLOW_GRPC
                connections.append((stack.enter_context(connection), head))
            num_sent = 0
            while time.monotonic() < end_s:
                for connection, head in connections:
                    with suppress(OSError):
                        connection.send(head[num_sent : num_sent + 1])
                num_sent += 1
                time.sleep(0.2)
        return Findings(figures={"connections": len(connections), "bytes each": num_sent})


class _UnendingBodies(Attack):
    """Bodies of a megabyte, which every server takes, of which the last byte never comes."""

    def run(self, target: Target, seconds: float) -> Findings:
        """Send to all connections as the server reads, and hold those that it does not close."""
        end_s = time.monotonic() + seconds
        statuses: Counter[str] = Counter()
        left: dict[socket.socket, memoryview] = {}
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {target.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {2**20}\r\n\r\n"
        )
        data = memoryview(head.encode() + b" " * (2**20 - 1))
        with selectors.DefaultSelector() as selector:
            for _ in range(250):
                connection = socket.create_connection(("127.0.0.1", target.http_port), 10.0)
                connection.setblocking(False)
                left[connection] = data
                selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while left and time.monotonic() < end_s:
                for key, events in selector.select(0.1):
                    assert isinstance(key.fileobj, socket.socket)
                    connection = key.fileobj
                    if events & selectors.EVENT_READ:
                        with suppress(OSError):
                            statuses[connection.recv(2**16)[9:12].decode() or "closed"] += 1
                        selector.unregister(connection)
                        connection.close()
                        del left[connection]
                        continue
                    with suppress(OSError):
                        left[connection] = left[connection][connection.send(left[connection]) :]
                    if not left[connection]:
                        selector.modify(connection, selectors.EVENT_READ)
        num_held = sum(len(data) - len(rest) for rest in left.values())
        for connection in left:
            connection.close()
        return Findings(figures={"answers": dict(statuses), "held_mib": num_held // 2**20})


CONNECTION_ATTACKS: dict[str, Attack] = {
    "allowed_preflights": HttpFlood(
        name="preflights of an allowed page",
        arguments=(f"--allowed-origins={_PAGE}",),
        request=_allowed_preflight,
        num_connections=50,
        allowed=frozenset(("204", "429")),
    ),
    "preflights": HttpFlood(
        name="preflights of 4000 headers",
        request=_other_preflight,
        num_connections=50,
        allowed=frozenset(("200", "204", "400", "401", "403", "429")),
    ),
    "keyless_requests": HttpFlood(
        name="HTTP requests without a key",
        request=_keyless,
        num_connections=200,
        allowed=frozenset(("401",)),
    ),
    "many_headers": HttpFlood(
        name="12 900 headers, without a key", request=_many_headers, allowed=frozenset(("431",))
    ),
    "new_health_checks": HttpFlood(
        name="health checks, a connection each",
        request=_health_check,
        num_connections=200,
        allowed=frozenset(("200", "429")),
    ),
    "small_chunks": HttpFlood(
        name="chunks of a byte, without a key",
        request=_small_chunks,
        num_connections=50,
        allowed=frozenset(("400", "401")),
    ),
    # 63 KiB of each head, which the server cannot do without.
    "held_heads": _HeldHeads(name="3 000 heads held, without a key", max_growth_mib=224.0),
    # The server has no limits per address, so new health checks wait or fail.
    "idle_connections": _IdleConnections(
        name="idle connections", is_bounded=False, max_descriptors=1024, fast_s=2.0, full_s=20.0
    ),
    "slow_heads": _SlowHeads(name="slow heads"),
    # 64 MiB of a tenant's bodies, and what the allocator keeps beside them.
    "unending_bodies": _UnendingBodies(name="unending bodies", max_growth_mib=112.0),
}
