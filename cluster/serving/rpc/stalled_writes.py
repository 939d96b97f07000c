"""Ends streaming calls whose client accepts no messages.

A writer only counts its marks, because a timer for each message would be slow. One timer looks at
all writers a few times within the timeout.
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
    """What is known of one call's writes."""

    __slots__ = ("is_stalled", "num_marks", "num_seen", "seen_s", "task")

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.task = task
        self.num_marks = 0
        """Increased before and after each write, so that it is odd during one."""
        self.num_seen = -1
        """The marks when they were last looked at."""
        self.seen_s = 0.0
        """When these marks were first seen, on the event loop's clock."""
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
            self._timer = loop.call_later(self._timeout_s / _LOOKS_PER_TIMEOUT, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now_s = loop.time()
        for writer in self._writers:
            if writer.num_marks != writer.num_seen:
                writer.num_seen, writer.seen_s = writer.num_marks, now_s
            elif (
                writer.num_marks % 2
                and not writer.is_stalled
                and now_s - writer.seen_s >= self._timeout_s
            ):
                writer.is_stalled = True
                writer.task.cancel()
        self._start_timer()
