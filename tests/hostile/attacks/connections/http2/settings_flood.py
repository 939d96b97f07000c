"""SETTINGS frames without end."""

from __future__ import annotations

import struct
from itertools import count
from typing import TYPE_CHECKING

from tests.hostile.floods.frame_flood import FrameFlood
from tests.hostile.http2 import SETTINGS, frame

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SettingsFlood"]

_INITIAL_WINDOW_SIZE = 4


class SettingsFlood(FrameFlood):
    """Each frame asks for an answer, and changes a value that all streams use."""

    name = "SETTINGS flood"

    def frames(self) -> Iterator[bytes]:
        """Yield many at once."""
        for size in count(65_535):
            yield frame(SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, size)) * 300
