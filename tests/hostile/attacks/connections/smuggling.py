"""Requests that another HTTP parser might read as two."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from tests.hostile.attack import Attack, Findings

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["Smuggling"]

_HIDDEN = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
_START = b"POST / HTTP/1.1\r\nHost: x\r\n"
_HEADS = (
    b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n%b",
    b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n0\r\n\r\n%b",
    b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n%b",
    b"Content-Length: %d, 0\r\n\r\n%b",
    b"Content-Length: +%d\r\n\r\n%b",
    b"Content-Length : %d\r\n\r\n%b",
    b"A: b\r\n Content-Length: %d\r\n\r\n%b",
    b"A: b\rContent-Length: %d\r\n\r\n%b",
    b"X: %d\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n%b",
    b"X: %d\r\nTransfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n%b",
)
# HTTP/1.0 has no Transfer-Encoding.
_OLD = (
    b"POST / HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\nX: %d\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n%b"
)


class Smuggling(Attack):
    """A second request in what one parser takes for the body of the first."""

    name = "request smuggling"

    def run(self, target: Target, seconds: float) -> Findings:
        """Send each, again and again; none may have two answers, or one of success."""
        end_s = time.monotonic() + seconds
        num_sent, broken = 0, set()
        while not num_sent or time.monotonic() < end_s:
            for head in (*(_START + head for head in _HEADS), _OLD):
                answer = _exchange(target.http_port, head % (len(_HIDDEN), _HIDDEN))
                num_sent += 1
                if answer.count(b"HTTP/1.1 ") != 1 or not answer.startswith(b"HTTP/1.1 400"):
                    broken.add(f"{head!r} was answered with {answer!r:.100}")
        return Findings(figures={"requests": num_sent}, broken=tuple(broken))


def _exchange(port: int, request: bytes) -> bytes:
    received = b""
    with socket.create_connection(("127.0.0.1", port), 10.0) as connection:
        connection.sendall(request)
        try:
            while part := connection.recv(2**16):
                received += part
        except ConnectionResetError:
            pass
    return received
