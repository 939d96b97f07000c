"""Attacks that send one request on many HTTP connections at once, again and again."""

from __future__ import annotations

import json
import selectors
import socket
import time
from abc import abstractmethod
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from tests.hostile.attack import Attack, Findings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.hostile.attack import Target

__all__ = ["HttpFlood", "completion_request"]

_RECEIVE_BYTES = 2**16


def completion_request(body: Mapping[str, object], key: str | None) -> bytes:
    """Return a request to `/v1/completions`."""
    content = json.dumps(body).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b"
        % ((key or "").encode(), len(content), content)
    )


class HttpFlood(Attack):
    """Connections that send the same bytes again once they are answered, or are opened again."""

    num_connections: ClassVar[int] = 100
    allowed: ClassVar[frozenset[str]]
    """What the server may answer."""

    @abstractmethod
    def request(self, key: str | None) -> bytes:
        """Return what each connection sends, given the attacker's key."""

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
        statuses = flood.statuses.keys() - self.allowed
        return Findings(
            figures={"answers": dict(flood.statuses), "closed": flood.num_closed},
            broken=tuple(f"The server answered {status}." for status in sorted(statuses)),
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
