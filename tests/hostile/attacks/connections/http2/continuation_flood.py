"""Headers of a call that never end."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

from tests.hostile.floods.frame_flood import FrameFlood
from tests.hostile.http2 import CONTINUATION, HEADERS, call_headers, frame, literal_field

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ContinuationFlood"]


class ContinuationFlood(FrameFlood):
    """One HEADERS frame, then CONTINUATION frames of which none is the last."""

    name = "CONTINUATION flood"

    def frames(self) -> Iterator[bytes]:
        """Yield frames of about the largest size."""
        yield frame(HEADERS, 0, 1, call_headers("/grpc.health.v1.Health/Check"))
        fields = b"".join(literal_field(b"x-%d" % index, b"a" * 100) for index in range(140))
        yield from repeat(frame(CONTINUATION, 0, 1, fields))
