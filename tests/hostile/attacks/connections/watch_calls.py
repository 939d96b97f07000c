"""Watch calls of the health service, without a key and without an end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.hostile.attack import Attack, Findings
from tests.hostile.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    Http2Connection,
    call_headers,
    frame,
)

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["WatchCalls"]

_NUM_CALLS = 64
_MESSAGE = bytes(5)
_HEADERS = call_headers("/grpc.health.v1.Health/Watch")


class WatchCalls(Attack):
    """As many Watch calls as the server allows, from the address of the honest probes."""

    name = "Watch calls"

    def run(self, target: Target, seconds: float) -> Findings:
        """Open the calls and keep them open."""
        end_s = time.monotonic() + seconds
        with Http2Connection(target.grpc_port) as connection:
            for stream in range(1, 2 * _NUM_CALLS, 2):
                connection.send_frames(
                    frame(HEADERS, END_HEADERS, stream, _HEADERS)
                    + frame(DATA, END_STREAM, stream, _MESSAGE)
                )
            while (left_s := end_s - time.monotonic()) > 0:
                connection.read_for(min(left_s, 0.1))
        return Findings(figures={"calls": _NUM_CALLS})
