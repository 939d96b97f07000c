"""Connections to both frontends that say nothing."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from tests.hostile.attack import Attack, Findings
from tests.hostile.http2 import PREFACE, SETTINGS, frame

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["IdleConnections"]

_NUM_CONNECTIONS = 1100
# The whole of 127.0.0.0/8 is the loopback.
_ADDRESS = "127.0.0.2"


class IdleConnections(Attack):
    """More connections than the server has descriptors, from one address."""

    name = "idle connections"
    max_descriptors = 1024
    # gRPC accepts up to its total before the excess of a host is closed.
    max_failed_checks = 3
    fast_s = 2.0
    full_s = 20.0

    def run(self, target: Target, seconds: float) -> Findings:
        """Open the connections, in turns to both frontends, and keep them open."""
        end_s = time.monotonic() + seconds
        with ExitStack() as stack:
            connections = []
            for index in range(2 * _NUM_CONNECTIONS):
                port = target.http_port if index % 2 else target.grpc_port
                connection = stack.enter_context(socket.socket())
                connection.bind((_ADDRESS, 0))
                connection.settimeout(max(0.1, end_s - time.monotonic()))
                with suppress(OSError):
                    connection.connect(("127.0.0.1", port))
                    connection.send(b"" if index % 2 else PREFACE + frame(SETTINGS, 0, 0))
                    connections.append(connection)
            time.sleep(max(0.0, end_s - time.monotonic()))
            num_open = sum(_is_open(connection) for connection in connections)
        return Findings(figures={"tried": 2 * _NUM_CONNECTIONS, "open at the end": num_open})


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
