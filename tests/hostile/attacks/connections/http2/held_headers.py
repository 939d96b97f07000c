"""Headers of gRPC calls that are received almost whole."""

from __future__ import annotations

import time
from contextlib import ExitStack

from tests.hostile.attack import Attack, Findings, Target
from tests.hostile.http2 import HEADERS, Http2Connection, call_headers, frame, literal_field

__all__ = ["HeldHeaders"]

_NUM_CONNECTIONS = 1000
# One per host would have at most half of the connections.
_NUM_HOSTS = 4
_BEGUN = frame(
    HEADERS,
    0,
    1,
    call_headers("/grpc.health.v1.Health/Check")
    + b"".join(literal_field(b"x-%d" % index, b"a" * 100) for index in range(64)),
)
_REJECTED_PAUSE_S = 0.05


class HeldHeaders(Attack):
    """7 KiB on each of a thousand connections, without a key."""

    name = "gRPC headers that never end"

    def run(self, target: Target, seconds: float) -> Findings:
        """Open connections for half of the time, and hold them for the rest."""
        began_s = time.monotonic()
        connections: list[Http2Connection] = []
        with ExitStack() as stack:
            while len(connections) < _NUM_CONNECTIONS:
                if time.monotonic() - began_s > seconds / 2:
                    break
                source = f"127.0.0.{2 + len(connections) % _NUM_HOSTS}"
                try:
                    connection = Http2Connection(target.grpc_port, source=source)
                except OSError:
                    time.sleep(_REJECTED_PAUSE_S)
                    continue
                connections.append(stack.enter_context(connection))
                connection.send_unread(_BEGUN)
            while time.monotonic() - began_s < seconds:
                time.sleep(0.05)
            for connection in connections:
                connection.read_for(0.0)
            num_open = sum(connection.is_open for connection in connections)
        return Findings(figures={"connections": len(connections), "open at the end": num_open})
