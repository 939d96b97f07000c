"""The text of a progress line about a download."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DownloadLine"]

_WINDOW_S = 5.0
_SHORTEST_S = 0.5


class DownloadLine:
    """The name of a model, and the bytes per second over the last seconds."""

    def __init__(self, model_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model_id = model_id
        self._clock = clock
        self._received: deque[tuple[float, int]] = deque()
        """Pairs of a time and the number of bytes that had been received then."""

    def text(self, num_bytes: int) -> str:
        """Return the text once this many bytes have been received; the speed follows `; `."""
        now_s = self._clock()
        self._received.append((now_s, num_bytes))
        while now_s - self._received[0][0] > _WINDOW_S:
            self._received.popleft()
        began_s, first = self._received[0]
        what = f"Downloading {self._model_id}"
        if now_s - began_s < _SHORTEST_S or num_bytes <= first:
            return what
        return f"{what}; {(num_bytes - first) / (now_s - began_s) / 1e6:.1f} MB/s"
