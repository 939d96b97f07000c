"""The masks of one step: some threads make them, and another one looks how they get on.

A thread inside the library cannot be stopped. So a sequence that holds the others for too long is
named, with the masks that were made by then, and the process is to end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.structured.processes.follower import SPARE_S, tokens_s
from cluster.structured.processes.mask_messages import Masks
from cluster.structured.processes.memory_limit import is_out_of_memory
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    from numpy.typing import NDArray

    from cluster.structured.processes.follower import Follower
    from cluster.structured.processes.mask_messages import Ask

__all__ = ["LOOK_S", "OLD_MASK_S", "MaskStep"]

LOOK_S = 0.05
"""Time between two looks."""
OLD_MASK_S = 0.1
"""CPU time that a mask may take in a step that is old; else it is `SPARE_S`."""
_OLD_S = 1.0
"""Many may be slow, one after another."""
_FEW = 4
"""Sequences that are not worth the waking of a thread."""
_WAIT = 6
"""A mask may sleep for so many times its CPU time."""
_MIN_WAIT_S = 3.0
"""It may sleep for so long at least: it waits for Python's lock on a busy machine."""


class MaskStep:
    """One question on its way to its answer."""

    def __init__(
        self,
        asks: Sequence[Ask],
        words: NDArray[np.int32],
        follower_of: Callable[[Ask], Follower],
        cost_of: Callable[[Ask], float],
    ) -> None:
        """`words` is `[num_asks, num_mask_words]`, all zero; `follower_of` may be slow as well.

        `cost_of` returns the CPU seconds that the mask is likely to take.
        """
        self._asks = asks
        self._words = words
        self._follower_of = follower_of
        # Who is done takes the next: some masks take a hundred times as long as others. Those come
        # last, so that they are the ones that a tenant has no time left for.
        self._left = deque(sorted(range(len(asks)), key=lambda row: cost_of(asks[row])))
        self._turns: dict[int, _Turn] = {}
        self._made: set[int] = set()
        self._ends: dict[int, FinishReason] = {}
        self._complaints: list[str] = []
        self._spent_s = [0.0] * len(asks)
        self._num_looks = 0

    def run(self, threads: ThreadPoolExecutor, num_threads: int) -> Masks:
        """Return the answer. Raises MemoryError if there was none and it is not known for whom."""
        try:
            if len(self._asks) > _FEW:
                running = [threads.submit(self._work_off) for _ in range(num_threads - 1)]
                self._work_off()
                for one in running:
                    one.result()
            else:
                self._work_off()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(self._asks) > 1:
                raise MemoryError from error
            return self._answer({0: "its grammar takes more memory than there is for masks"})
        return self._answer({})

    def look(self) -> Masks | None:
        """Return the answer that there is, if a sequence takes too long for it to be awaited.

        Called each `LOOK_S`, by one other thread.
        """
        # Looks, not a clock: none are taken while the whole machine stands still.
        self._num_looks += 1
        is_old = self._num_looks * LOOK_S >= _OLD_S
        culprits = {}
        for row, turn in self._turns.copy().items():
            turn.look()
            if turn.is_over(is_old=is_old):
                culprits[row] = (
                    f"its mask, for which others wait, took {turn.spent_s():.2f} s so far"
                )
        if not culprits:
            return None
        answer = self._answer(culprits)
        # All of them may have come to their ends since.
        return answer if answer.culprits else None

    def _answer(self, culprits: dict[int, str]) -> Masks:
        made = self._made.copy()
        culprits = {row: text for row, text in culprits.items() if row not in made}
        unmade = [row for row in range(len(self._asks)) if row not in made and row not in culprits]
        ends = {row: end for row, end in self._ends.copy().items() if row in made}
        ends |= dict.fromkeys(culprits, FinishReason.ERROR)
        complaints = [*self._complaints, *culprits.values()]
        return Masks(ends, complaints, self._words.tobytes(), list(culprits), unmade, self._spent_s)

    def _work_off(self) -> None:
        while True:
            try:
                row = self._left.popleft()
            except IndexError:
                return
            ask = self._asks[row]
            self._turns[row] = _Turn(tokens_s(ask))
            try:
                self._make(row, ask)
            finally:
                del self._turns[row]
            self._made.add(row)

    def _make(self, row: int, ask: Ask) -> None:
        follower = self._follower_of(ask)
        found = follower.write_mask(ask.token_ids, self._words, row)
        self._spent_s[row] = follower.spent_s
        if found is not None:
            self._ends[row] = found
        if found is FinishReason.ERROR:
            self._complaints.append(follower.complaint)


class _Turn:
    """A thread at work for one sequence."""

    def __init__(self, allowed_s: float) -> None:
        """Its tokens allow `allowed_s` of CPU time."""
        self._num_asleep = 0
        self._thread_id = threading.get_native_id()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._began_s = time.thread_time()
        self._allowed_s = allowed_s

    def spent_s(self) -> float:
        """Return the CPU time that it took so far."""
        return time.clock_gettime(self._clock) - self._began_s

    def look(self) -> None:
        """Note whether it sleeps. Called each `LOOK_S`."""
        # One that is ready to run is kept from it by others, which it is not to blame for.
        self._num_asleep += not _is_runnable(self._thread_id)

    def is_over(self, *, is_old: bool) -> bool:
        """Return whether it takes too long, in a step that is old or not."""
        limit_s = (OLD_MASK_S if is_old else SPARE_S) + self._allowed_s
        asleep_s = self._num_asleep * LOOK_S
        return self.spent_s() > limit_s or asleep_s > max(_WAIT * limit_s, _MIN_WAIT_S)


def _is_runnable(thread_id: int) -> bool:
    try:
        stat = Path(f"/proc/self/task/{thread_id}/stat").read_bytes()
    except (OSError, MemoryError):
        # Who takes all memory is found otherwise.
        return True
    # Behind the name, which may hold anything.
    return stat.rpartition(b")")[2].split()[0] == b"R"
