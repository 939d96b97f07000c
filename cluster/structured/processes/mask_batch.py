"""The masks of one step, made by a few threads under the watch of another one.

A thread inside of xgrammar cannot be stopped. So a sequence that delays the others for too long is
named in the reply, together with the masks made by then, and the process exits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.structured.processes.memory_limit import is_out_of_memory
from cluster.structured.processes.messages import StepReply
from cluster.structured.processes.sequence_matcher import BASE_CPU_S, allowed_cpu_s
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    from numpy.typing import NDArray

    from cluster.structured.processes.messages import MaskQuery
    from cluster.structured.processes.sequence_matcher import SequenceMatcher

__all__ = ["CHECK_INTERVAL_S", "LATE_MASK_S", "MaskBatch"]

CHECK_INTERVAL_S = 0.05
"""Time between two calls of `check_timeouts`."""
LATE_MASK_S = 0.1
"""CPU time that a mask may take in a late step; in any other, it is `BASE_CPU_S`."""
_LATE_S = 1.0
"""Age at which a step is late, since many masks may be slow, one after another."""
_MAX_INLINE = 4
"""Queries up to which no other thread is worth waking."""
_SLEEP_FACTOR = 6
"""A mask may sleep this many times its CPU time."""
_MIN_SLEEP_S = 3.0
"""A mask may sleep at least this long, waiting for Python's lock on a busy machine."""


class MaskBatch:
    """Makes the reply to one step's queries."""

    def __init__(
        self,
        queries: Sequence[MaskQuery],
        words: NDArray[np.int32],
        matcher_of: Callable[[MaskQuery], SequenceMatcher],
        cost_of: Callable[[MaskQuery], float],
    ) -> None:
        """`words` is `[num_queries, num_mask_words]`, all zero; `matcher_of` may be slow as well.

        `cost_of` returns the CPU seconds that a mask is expected to take.
        """
        self._queries = queries
        self._words = words
        self._matcher_of = matcher_of
        # Threads take rows one by one, as some masks take a hundred times as long as others. The
        # slowest come last, so that these are the ones an exhausted budget ends.
        self._left = deque(sorted(range(len(queries)), key=lambda row: cost_of(queries[row])))
        self._timers: dict[int, _MaskTimer] = {}
        self._made: set[int] = set()
        self._finish_reasons: dict[int, FinishReason] = {}
        self._errors: dict[int, str] = {}
        self._cpu_s = [0.0] * len(queries)
        self._num_checks = 0

    def make_masks(self, threads: ThreadPoolExecutor, num_threads: int) -> StepReply:
        """Return the reply. Raises MemoryError if memory ran out and the cause is unknown."""
        try:
            if len(self._queries) > _MAX_INLINE:
                running = [threads.submit(self._work) for _ in range(num_threads - 1)]
                self._work()
                for one in running:
                    one.result()
            else:
                self._work()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(self._queries) > 1:
                raise MemoryError from error
            return self._reply({0: "its mask ran out of memory"})
        return self._reply({})

    def check_timeouts(self) -> StepReply | None:
        """Return the reply so far if a sequence takes too long to wait for.

        Called every `CHECK_INTERVAL_S`, by one other thread.
        """
        # Checks are counted instead of time: none happen while the whole machine is suspended.
        self._num_checks += 1
        is_late = self._num_checks * CHECK_INTERVAL_S >= _LATE_S
        offenders = {}
        for row, timer in self._timers.copy().items():
            timer.check_sleep()
            if timer.is_over(is_late=is_late):
                offenders[row] = (
                    f"its mask took {timer.cpu_s():.2f} s of CPU time while the step waited"
                )
        if not offenders:
            return None
        reply = self._reply(offenders)
        # All of them may have finished in the meantime.
        return reply if reply.offenders else None

    def _reply(self, offenders: dict[int, str]) -> StepReply:
        made = self._made.copy()
        offenders = {row: text for row, text in offenders.items() if row not in made}
        rows = range(len(self._queries))
        missing = [row for row in rows if row not in made and row not in offenders]
        reasons = {row: one for row, one in self._finish_reasons.copy().items() if row in made}
        reasons |= dict.fromkeys(offenders, FinishReason.ERROR)
        errors = {row: text for row, text in self._errors.copy().items() if row in made}
        errors |= offenders
        words = self._words.tobytes()
        return StepReply(reasons, errors, words, list(offenders), missing, self._cpu_s)

    def _work(self) -> None:
        while True:
            try:
                row = self._left.popleft()
            except IndexError:
                return
            query = self._queries[row]
            self._timers[row] = _MaskTimer(allowed_cpu_s(query))
            try:
                self._make(row, query)
            finally:
                del self._timers[row]
            self._made.add(row)

    def _make(self, row: int, query: MaskQuery) -> None:
        matcher = self._matcher_of(query)
        found = matcher.write_mask(query.token_ids, self._words, row)
        self._cpu_s[row] = matcher.cpu_s
        if found is not None:
            self._finish_reasons[row] = found
        if found is FinishReason.ERROR:
            self._errors[row] = matcher.error


class _MaskTimer:
    """Times the thread that makes one mask."""

    def __init__(self, allowed_s: float) -> None:
        """The tokens of the query allow `allowed_s` of CPU time."""
        self._num_asleep = 0
        self._thread_id = threading.get_native_id()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._began_s = time.thread_time()
        self._allowed_s = allowed_s

    def cpu_s(self) -> float:
        """Return the CPU time taken so far."""
        return time.clock_gettime(self._clock) - self._began_s

    def check_sleep(self) -> None:
        """Count whether the thread sleeps. Called every `CHECK_INTERVAL_S`."""
        # A thread that is ready to run but has no processor is not to blame.
        self._num_asleep += not _is_runnable(self._thread_id)

    def is_over(self, *, is_late: bool) -> bool:
        """Return whether the mask takes too long, in a step that is late or not."""
        limit_s = (LATE_MASK_S if is_late else BASE_CPU_S) + self._allowed_s
        asleep_s = self._num_asleep * CHECK_INTERVAL_S
        return self.cpu_s() > limit_s or asleep_s > max(_SLEEP_FACTOR * limit_s, _MIN_SLEEP_S)


def _is_runnable(thread_id: int) -> bool:
    try:
        stat = Path(f"/proc/self/task/{thread_id}/stat").read_bytes()
    except (OSError, MemoryError):
        # A sequence that takes all memory is detected elsewhere.
        return True
    # The state follows the name, which may contain anything.
    return stat.rpartition(b")")[2].split()[0] == b"R"
