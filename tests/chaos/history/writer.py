"""Writes the events of a run to a file, with the run's clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from tests.chaos.history.events import Event, encode

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["History"]


class History:
    """A file of events, as a context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._started_s = time.monotonic()
        self.num_arrivals = 0
        """Grows while tokens arrive."""

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return round(time.monotonic() - self._started_s, 4)

    def add(self, event: Event) -> None:
        """Write an event."""
        self._file.write(encode(event))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
