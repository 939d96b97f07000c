"""Attacks that send the same requests, bytes or frames again and again."""

from __future__ import annotations

import http.client
import json
import selectors
import socket
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import grpc

from tests.hostile.attack import Attack, Findings, Target
from tests.hostile.http2 import Http2Connection
from tests.load.report import times_ms

__all__ = ["CallFlood", "FrameFlood", "HttpFlood", "PostFlood", "post_request"]

_PAUSE_S = 0.02
_PATIENCE_S = 3.0
"""How long a client waits for an answer at least; a long attack waits for its whole time."""
_CALL_TIMEOUT_S = 30.0
# Otherwise channels share a connection.
_CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
_RECEIVE_BYTES = 2**16
_REJECTED_PAUSE_S = 0.05

Answer = tuple[str, float]
"""A status or code, and the seconds that it took."""


@dataclass(frozen=True, kw_only=True)
class _RequestFlood(Attack):
    """Several connections with the attacker's key, each of which waits for answers."""

    body: Callable[[], bytes]
    """Returns the content of each request."""
    num_connections: int = 8
    allowed: frozenset[str] = frozenset()
    """What the server may answer."""

    @abstractmethod
    def send_until(self, end_s: float, target: Target, body: bytes) -> list[Answer]:
        """Send on one connection, and return the answers."""

    def run(self, target: Target, seconds: float) -> Findings:
        """Send on all connections."""
        body = self.body()
        end_s = time.monotonic() + seconds
        with ThreadPoolExecutor(self.num_connections) as threads:
            runs = [
                threads.submit(self.send_until, end_s, target, body)
                for _ in range(self.num_connections)
            ]
            answers = [answer for one in runs for answer in one.result()]
        numbers = Counter(what for what, _ in answers)
        times = times_ms([seconds for _, seconds in answers])
        return Findings(
            figures={"bytes": len(body), "answers": dict(numbers), **times},
            broken=_broken(numbers, self.allowed),
        )


@dataclass(frozen=True, kw_only=True)
class PostFlood(_RequestFlood):
    """Requests that post a body to one path."""

    path: str = "/v1/completions"
    allowed: frozenset[str] = frozenset(("400", "413", "429"))
    next_body: Callable[[bytes], bytes] = bytes
    """Returns the content of the next request, given that of `body`."""

    def send_until(self, end_s: float, target: Target, body: bytes) -> list[Answer]:
        """Post on one connection, and return the statuses."""
        answers: list[Answer] = []
        headers = {"Authorization": f"Bearer {target.key}", "Content-Type": "application/json"}
        timeout_s = max(_PATIENCE_S, end_s - time.monotonic())
        connection = http.client.HTTPConnection("127.0.0.1", target.http_port, timeout=timeout_s)
        while time.monotonic() < end_s:
            started_s = time.monotonic()
            try:
                connection.request("POST", self.path, self.next_body(body), headers)
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException):
                # The server closes a connection whose body it does not read; others wait too long.
                connection.close()
                time.sleep(_PAUSE_S)
                continue
            answers.append((str(answer.status), time.monotonic() - started_s))
        connection.close()
        return answers


@dataclass(frozen=True, kw_only=True)
class CallFlood(_RequestFlood):
    """gRPC calls of one method."""

    method: str = "Generate"
    allowed: frozenset[str] = frozenset(("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"))

    def send_until(self, end_s: float, target: Target, body: bytes) -> list[Answer]:
        """Call on one channel, and return the codes."""
        answers: list[Answer] = []
        metadata = (("authorization", f"Bearer {target.key}"),)
        with grpc.insecure_channel(f"127.0.0.1:{target.grpc_port}", _CHANNEL_OPTIONS) as channel:
            start = channel.unary_stream(
                f"/pagedray.v1.GenerationService/{self.method}",
                request_serializer=bytes,
                response_deserializer=bytes,
            )
            while time.monotonic() < end_s:
                started_s = time.monotonic()
                code = start(body, metadata=metadata, timeout=_CALL_TIMEOUT_S).code()
                answers.append((code.name, time.monotonic() - started_s))
        return answers


def post_request(path: str, body: object, key: str | None) -> bytes:
    """Return a request with a JSON body."""
    content = json.dumps(body).encode()
    return (
        b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b"
        % (path.encode(), (key or "").encode(), len(content), content)
    )


@dataclass(frozen=True, kw_only=True)
class HttpFlood(Attack):
    """Connections that send the same bytes again once they are answered, or are opened again."""

    request: Callable[[str | None], bytes]
    """Returns the bytes of each connection, given the attacker's key."""
    num_connections: int = 100
    allowed: frozenset[str]
    """What the server may answer."""

    def run(self, target: Target, seconds: float) -> Findings:
        """Send on all connections as the server reads."""
        with selectors.DefaultSelector() as selector:
            flood = _Connections(selector, target.http_port, self.request(target.key))
            for _ in range(self.num_connections):
                flood.open_connection()
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                flood.serve(selector.select(0.1))
            flood.close()
        return Findings(
            figures={"answers": dict(flood.statuses), "closed": flood.num_closed},
            broken=_broken(flood.statuses, self.allowed),
        )


class _Connections:
    def __init__(self, selector: selectors.BaseSelector, port: int, request: bytes) -> None:
        self.statuses: Counter[str] = Counter()
        self.num_closed = 0
        """Connections that the server has closed."""
        self._selector = selector
        self._port = port
        self._request = request
        self._unsent: dict[socket.socket, memoryview] = {}

    def open_connection(self) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        with suppress(BlockingIOError):
            connection.connect(("127.0.0.1", self._port))
        self._unsent[connection] = memoryview(self._request)
        self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def serve(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Receive and send on the connections that are ready."""
        for key, events in ready:
            assert isinstance(key.fileobj, socket.socket)
            if events & selectors.EVENT_READ and not self._receive(key.fileobj):
                self._close(key.fileobj)
                self.num_closed += 1
                self.open_connection()
            elif events & selectors.EVENT_WRITE:
                self._send(key.fileobj)

    def close(self) -> None:
        for connection in list(self._unsent):
            self._close(connection)

    def _receive(self, connection: socket.socket) -> bool:
        """Note an answer; return whether the connection is open."""
        try:
            received = connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if received.startswith(b"HTTP/1.1 "):
            self.statuses[received[9:12].decode()] += 1
        if received and not self._unsent[connection]:
            self._unsent[connection] = memoryview(self._request)
            self._selector.modify(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        return bool(received)

    def _send(self, connection: socket.socket) -> None:
        with suppress(OSError):
            num_sent = connection.send(self._unsent[connection])
            self._unsent[connection] = self._unsent[connection][num_sent:]
        if not self._unsent[connection]:
            self._selector.modify(connection, selectors.EVENT_READ)

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        del self._unsent[connection]


@dataclass(frozen=True, kw_only=True)
class FrameFlood(Attack):
    """Frames on connections to gRPC that are opened again whenever the server closes them."""

    frames: Callable[[], Iterator[bytes]]
    """Yields the bytes of one connection, in parts of some KiB."""
    num_connections: int = 2

    def run(self, target: Target, seconds: float) -> Findings:
        """Send on each connection in turns."""
        end_s = time.monotonic() + seconds
        open_connections: list[tuple[Http2Connection, Iterator[bytes]]] = []
        num_bytes = num_parts = num_opened = 0
        while time.monotonic() < end_s:
            while len(open_connections) < self.num_connections:
                try:
                    open_connections.append((Http2Connection(target.grpc_port), self.frames()))
                    num_opened += 1
                except OSError:
                    time.sleep(_REJECTED_PAUSE_S)
                    break
            for connection, frames in open_connections[:]:
                data = next(frames, None)
                timeout_s = max(0.1, end_s - time.monotonic())
                if data is None or not connection.send_frames(data, timeout_s):
                    connection.close()
                    open_connections.remove((connection, frames))
                else:
                    num_bytes += len(data)
                    num_parts += 1
        for connection, _ in open_connections:
            connection.close()
        mib = round(num_bytes / 2**20, 1)
        return Findings(figures={"parts": num_parts, "mib": mib, "connections": num_opened})


def _broken(answers: Counter[str], allowed: frozenset[str]) -> tuple[str, ...]:
    return tuple(f"The server answered {what}." for what in sorted(answers.keys() - allowed))
