"""Calls without a key, as fast as they are rejected."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from tests.hostile.floods.frame_flood import FrameFlood
from tests.hostile.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, call_headers, frame

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["KeylessCalls"]

_MESSAGE = struct.pack(">BI", 0, 0)


class KeylessCalls(FrameFlood):
    """Complete calls of Generate, each of which is UNAUTHENTICATED."""

    name = "calls without a key"

    def frames(self) -> Iterator[bytes]:
        """Yield twenty calls at a time."""
        headers = call_headers("/pagedray.v1.GenerationService/Generate")
        for first in range(1, 2**31 - 40, 40):
            yield b"".join(
                frame(HEADERS, END_HEADERS, stream, headers)
                + frame(DATA, END_STREAM, stream, _MESSAGE)
                for stream in range(first, first + 40, 2)
            )
