"""How much of the event loop HTTP requests may take while anyone waits for tokens.

asyncio serves every socket that is ready before anything else: hundreds of requests at once would
take tens of milliseconds, and a flood of them all of the time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ReadTurns"]

_PER_PASS = 4
"""Reads of a pass, each of which may begin a request of about 0.3 ms."""
_NUM_ITERATIONS = 4
"""Iterations of the event loop in a pass. What a read begins, such as a response and closing the
connection, runs in later ones."""
_PASS_S = 0.0005
"""No read follows in a pass that has taken as long, where a pass is followed by a pause."""
_MAX_WAITING_BYTES = 2**22
"""Bytes of all waiting connections together; beyond this, no further bytes wait."""
_MAX_CREDIT_S = 0.0005
_MAX_DEBT_S = 0.01
"""What a pass takes beyond it causes no longer pause."""


class ReadTurns:
    """Decides when what was received on a connection is handled. Used from the loop only."""

    def __init__(self, *, has_streams: Callable[[], bool], share: float = 1.0) -> None:
        """`has_streams` returns whether anyone waits for tokens; otherwise nothing waits.

        Meanwhile, passes of the loop with reads take about `share` of its time: it pauses reading
        between them.
        """
        self._has_streams = has_streams
        self._share = share
        self._num_left = _PER_PASS
        self._is_counting = False
        """Whether the next pass is scheduled to begin the count again."""
        self._waiting: dict[str, deque[tuple[Callable[[], None], int]]] = {}
        """What handles the reads of each line, whose turn comes in order, and their bytes."""
        self._num_waiting_bytes = 0
        self._credit_s = 0.0
        """Time that passes may take before the next pause."""
        self._began_s = 0.0
        self._began_cpu_s = 0.0
        """The thread's CPU time when the pass began."""
        self._excluded_s = 0.0

    def take(self, num_bytes: int = 0) -> bool:
        """Return whether a read of this many bytes may be handled in this pass."""
        if not self._has_streams():
            return True
        # What brings no bytes, such as a connection to be opened, may always wait.
        if num_bytes and self._num_waiting_bytes > _MAX_WAITING_BYTES:
            return True
        if not self._is_counting:
            self._is_counting = True
            self._note_begin()
            self._schedule_end()
        if not self._has_room:
            return False
        self._num_left -= 1
        return True

    def wait(self, line: str, handle: Callable[[], None], num_bytes: int) -> None:
        """Have `handle` called in a later pass, after `take` has returned False.

        Lines take turns.
        """
        self._waiting.setdefault(line, deque()).append((handle, num_bytes))
        self._num_waiting_bytes += num_bytes

    def exclude(self, seconds: float) -> None:
        """Do not count work of this pass that was just done: it has a limit of its own."""
        self._excluded_s += seconds

    @property
    def _has_room(self) -> bool:
        return self._num_left > 0 and (self._share == 1.0 or self._used_s < _PASS_S)

    @property
    def _used_s(self) -> float:
        """What the pass has taken."""
        return time.thread_time() - self._began_cpu_s - self._excluded_s

    def _note_begin(self) -> None:
        now_s = time.monotonic()
        gained_s = self._share * (now_s - self._began_s)
        self._credit_s = min(self._credit_s + gained_s, _MAX_CREDIT_S)
        self._began_s = now_s
        self._began_cpu_s = time.thread_time()
        self._excluded_s = 0.0

    def _schedule_end(self, num_iterations: int = _NUM_ITERATIONS) -> None:
        """End the pass after some iterations of the event loop."""
        loop = asyncio.get_running_loop()
        if num_iterations > 1 and self._share < 1.0:
            loop.call_soon(self._schedule_end, num_iterations - 1)
        else:
            loop.call_soon(self._end_pass)

    def _end_pass(self) -> None:
        """Begin the next pass, or pause before it if this one has taken more than the share."""
        self._credit_s = max(self._credit_s - max(self._used_s, 0.0), -_MAX_DEBT_S)
        if self._share < 1.0 and self._credit_s < 0.0 and self._has_streams():
            self._num_left = 0
            pause_s = -self._credit_s / self._share
            asyncio.get_running_loop().call_later(pause_s, self._begin_pass)
        else:
            self._begin_pass()

    def _begin_pass(self) -> None:
        self._note_begin()
        self._num_left = _PER_PASS
        try:
            self._handle_waiting()
        finally:
            self._is_counting = bool(self._waiting) or self._num_left < _PER_PASS
            if self._is_counting:
                self._schedule_end()

    def _handle_waiting(self) -> None:
        while self._waiting and self._has_room:
            self._num_left -= 1
            line = next(iter(self._waiting))
            reads = self._waiting.pop(line)
            handle, num_bytes = reads.popleft()
            if reads:
                # Behind the other lines.
                self._waiting[line] = reads
            self._num_waiting_bytes -= num_bytes
            handle()
