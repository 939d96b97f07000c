"""Ends streaming calls of clients that accept no messages.

A writer only counts its marks, because a timer for each message would be slow. A timer looks at all
writers a few times within the timeout. Looks are counted instead of seconds, so a pause of the
process, in which no client could have been served, is not a stall.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pagedray.errors import StalledReaderError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["StalledWrites", "StreamWriter"]

_LOOKS_PER_TIMEOUT = 10


class StreamWriter:
    """The progress of one call's writes."""

    __slots__ = ("is_stalled", "num_looks", "num_marks", "num_seen", "task")

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.task = task
        self.num_marks = 0
        """Increased before and after each write, so that it is odd during a write."""
        self.num_seen = -1
        """The marks when they were last looked at."""
        self.num_looks = 0
        """How often these marks were looked at again."""
        self.is_stalled = False


class StalledWrites:
    """Watches the writes of a server's streaming calls. Used from the event loop only."""

    def __init__(self, timeout_s: float) -> None:
        """A write may take `timeout_s`, and up to a tenth more."""
        self._timeout_s = timeout_s
        self._writers: set[StreamWriter] = set()
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watched(self) -> Iterator[StreamWriter]:
        """Watch the writes of the current task inside the block.

        A write that takes too long is cancelled, and the block raises StalledReaderError.
        """
        task = asyncio.current_task()
        assert task is not None
        writer = StreamWriter(task)
        self._writers.add(writer)
        self._start_timer()
        try:
            yield writer
        except asyncio.CancelledError:
            if not writer.is_stalled:
                raise
            task.uncancel()
            raise StalledReaderError(
                "The stream was aborted: its client did not accept a message within "
                f"{self._timeout_s:g} s."
            ) from None
        finally:
            self._writers.discard(writer)

    def _start_timer(self) -> None:
        if self._timer is None and self._writers:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_s / _LOOKS_PER_TIMEOUT, self._look)

    def _look(self) -> None:
        self._timer = None
        for writer in self._writers:
            if writer.num_marks != writer.num_seen:
                writer.num_seen, writer.num_looks = writer.num_marks, 0
                continue
            writer.num_looks += 1
            is_writing = bool(writer.num_marks % 2)
            if is_writing and not writer.is_stalled and writer.num_looks >= _LOOKS_PER_TIMEOUT:
                writer.is_stalled = True
                writer.task.cancel()
        self._start_timer()
