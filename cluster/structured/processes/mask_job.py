"""One mask to be made, and the time that its thread takes.

It knows no other masks; `mask_work` decides which thread makes it, and when it takes too long.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cluster.structured.processes.messages import MadeMask
from cluster.structured.processes.sequence_matcher import BASE_CPU_S, allowed_cpu_s
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.structured.processes.messages import MaskQuery
    from cluster.structured.processes.sequence_matcher import SequenceMatcher

__all__ = ["CHECK_INTERVAL_S", "MaskJob"]

CHECK_INTERVAL_S = 0.05
"""Time between two checks of the limits of masks that are being made."""
_CHEAP_S = 0.001
"""CPU time of masks that are made before others, even of a tenant with costly masks."""
_SLEEP_FACTOR = 6
"""A mask may sleep this many times its CPU time."""
_MIN_SLEEP_S = 3.0
"""A mask may sleep at least this long, waiting for the GIL on a busy machine."""


class MaskJob:
    """One mask to be made."""

    def __init__(
        self,
        query: MaskQuery,
        tenant: str,
        matcher_of: Callable[[MaskQuery], SequenceMatcher | None],
        *,
        num_words: int,
        expected_s: float | None,
    ) -> None:
        """`matcher_of` returns None for a sequence that has ended.

        `expected_s` is its expected CPU time; None if the sequence has had no mask yet.
        """
        self.sequence_id = query.sequence_id
        self.tenant = tenant
        self.expected_s = expected_s
        self.timer: _MaskTimer | None = None
        """Set while a thread makes it."""
        self.made: MadeMask | None = None
        self.is_cancelled = False
        """Whether its sequence has ended, so that it is not needed."""
        self.is_costly = False
        """Whether its thread has low priority."""
        self.is_alone = False
        """Whether no other mask was to be made when it was requested."""
        self._query = query
        self._matcher_of = matcher_of
        self._words = np.zeros((1, num_words), dtype=np.int32)

    @property
    def is_cheap(self) -> bool:
        """Whether the last mask of its sequence was."""
        return self.expected_s is not None and self.expected_s <= _CHEAP_S

    def make(self) -> MadeMask | None:
        """Make it in the calling thread, unless its sequence has ended.

        Raises MemoryError or RuntimeError.
        """
        self.timer = _MaskTimer(allowed_cpu_s(self._query))
        matcher = self._matcher_of(self._query)
        if matcher is None:
            return None
        found = matcher.write_mask(self._query.token_ids, self._words, 0)
        return MadeMask(
            self.sequence_id,
            matcher.cpu_s,
            matcher.last_cpu_s,
            b"" if found is not None else self._words.tobytes(),
            found,
            matcher.error if found is FinishReason.ERROR else "",
            is_free=found is None and matcher.is_free,
        )

    def failed(self, error: str) -> MadeMask:
        """Return the end of its sequence, which ends the process, too."""
        return MadeMask(
            self.sequence_id,
            0.0,
            0.0,
            finish_reason=FinishReason.ERROR,
            error=error,
            is_offender=True,
        )


class _MaskTimer:
    """Times the thread that makes one mask."""

    def __init__(self, allowed_s: float) -> None:
        """The tokens of the query allow `allowed_s` of CPU time."""
        self._num_asleep = 0
        self._thread_id = threading.get_native_id()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._began_s = time.thread_time()
        self._limit_s = BASE_CPU_S + allowed_s

    def cpu_s(self) -> float:
        """Return the CPU time taken so far."""
        return time.clock_gettime(self._clock) - self._began_s

    def check_sleep(self) -> None:
        """Count whether the thread sleeps. Called every `CHECK_INTERVAL_S`."""
        # A thread that is ready to run but has no processor is not to blame.
        self._num_asleep += not _is_runnable(self._thread_id)

    @property
    def is_over(self) -> bool:
        """Whether the mask takes too long."""
        asleep_s = self._num_asleep * CHECK_INTERVAL_S
        return self.cpu_s() > self._limit_s or asleep_s > max(
            _SLEEP_FACTOR * self._limit_s, _MIN_SLEEP_S
        )


def _is_runnable(thread_id: int) -> bool:
    try:
        stat = Path(f"/proc/self/task/{thread_id}/stat").read_bytes()
    except (OSError, MemoryError):
        # A sequence that takes all memory is detected elsewhere.
        return True
    # The state follows the name, which may contain anything.
    return stat.rpartition(b")")[2].split()[0] == b"R"
