"""PING frames without end."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

from tests.hostile.floods.frame_flood import FrameFlood
from tests.hostile.http2 import PING, frame

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PingFlood"]


class PingFlood(FrameFlood):
    """Each PING asks for an answer."""

    name = "PING flood"

    def frames(self) -> Iterator[bytes]:
        """Yield many at once."""
        yield from repeat(frame(PING, 0, 0, bytes(8)) * 500)
