"""HTTP bodies of which the last byte never comes."""

from __future__ import annotations

import selectors
import socket
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.hostile.attack import Attack, Findings

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["UnendingBodies"]

_NUM_CONNECTIONS = 250
_NUM_BYTES = 2**20
_HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\n"
    f"Content-Type: application/json\r\nContent-Length: {_NUM_BYTES}\r\n\r\n"
)


class UnendingBodies(Attack):
    """Bodies of a megabyte, less a byte, which every server takes."""

    name = "unending bodies"
    # 64 MiB of a tenant's bodies, and what the allocator keeps beside them.
    max_growth_mib = 112.0

    def run(self, target: Target, seconds: float) -> Findings:
        """Send to all connections as the server reads, and hold those that it does not close."""
        end_s = time.monotonic() + seconds
        statuses: Counter[str] = Counter()
        left: dict[socket.socket, memoryview] = {}
        data = memoryview(_HEAD.format(target.key).encode() + b" " * (_NUM_BYTES - 1))
        with selectors.DefaultSelector() as selector:
            for _ in range(_NUM_CONNECTIONS):
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
