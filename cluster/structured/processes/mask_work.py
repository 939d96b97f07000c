"""The masks being made: quick masks by a few threads, costly masks by others.

A thread inside xgrammar cannot be interrupted. So a thread with a costly mask continues at low
priority, and another thread takes its place; each tenant has at most one such thread at a time,
which makes its other costly masks, too. A mask that takes too long altogether ends its sequence and
the process.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from cluster.structured.processes.memory_limit import is_out_of_memory
from pagedray.machine import lower_priority

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from cluster.structured.processes.mask_job import MaskJob
    from cluster.structured.processes.messages import MadeMask

__all__ = ["MaskWork"]

_COSTLY_S = 0.005
"""CPU time of a mask that continues at low priority, even if no step waits for others."""
_NICENESS = 10
"""Priority of costly masks, for which no step waits; they still get a tenth of a busy core."""
_SLOW_S = 0.01
"""CPU time of a mask that continues at the lowest priority, a seventieth of a busy core."""
_SLOW_NICENESS = 19


class MaskWork:
    """Makes masks in threads of its own."""

    def __init__(self, num_threads: int, send: Callable[[list[MadeMask]], None]) -> None:
        """`send` gets masks that `make_masks` did not wait for."""
        self._num_threads = num_threads
        self._send = send
        self._lock = threading.Lock()
        """Held to access everything below."""
        self._has_quick = threading.Condition(self._lock)
        self._has_made = threading.Condition(self._lock)
        """Notified when all masks that `make_masks` waits for are made."""
        self._quick: deque[MaskJob] = deque()
        self._costly: dict[str, deque[MaskJob]] = {}
        """The next masks of a tenant's thread."""
        self._running: dict[int, MaskJob] = {}
        """Jobs by the thread that runs them."""
        self._awaited: Collection[MaskJob] = ()
        """The masks that `make_masks` waits for."""
        self._num_awaited = 0
        """How many of them are not made yet."""
        # A thread started later might find no memory for its stack.
        all_run = threading.Barrier(num_threads + 1)
        for _ in range(num_threads):
            _start_thread(lambda: self._make_quick(all_run))
        all_run.wait()

    @property
    def is_idle(self) -> bool:
        """Whether all masks are made."""
        return not (self._running or self._quick or self._costly)

    def make_masks(self, jobs: Sequence[MaskJob], patience_s: float) -> list[MadeMask]:
        """Return the finished masks once all quick masks are made, or after `patience_s`."""
        with self._lock:
            for job in jobs:
                job.is_alone = len(jobs) == 1 and self.is_idle
            quick = self._awaited = self._queue(jobs, patience_s)
            self._num_awaited = len(quick)
            self._has_quick.notify(len(quick))
            self._has_made.wait_for(lambda: not self._num_awaited, patience_s)
            self._awaited = ()
            self._set_aside(patience_s / 2)
            return _made(quick)

    def cancel(self, sequence_ids: Collection[int]) -> None:
        """Make no masks for ended sequences, and do not return a mask being made."""
        with self._lock:
            for job in (*self._quick, *self._running.values(), *self._left_costly()):
                job.is_cancelled = job.is_cancelled or job.sequence_id in sequence_ids

    def check_limits(self) -> list[MadeMask]:
        """Return how sequences with overlong masks end, and the masks not returned yet.

        It returns nothing if no mask takes too long. Called every `CHECK_INTERVAL_S`.
        """
        with self._lock:
            self._set_aside(_COSTLY_S)
            self._slow_down()
            offenders = []
            for job in self._running.values():
                timer = job.timer
                if timer is None:
                    continue
                timer.check_sleep()
                if timer.is_over:
                    offenders.append(job.failed(f"its mask took {timer.cpu_s():.2f} s of CPU time"))
            return [*_made(self._awaited), *offenders] if offenders else []

    def _queue(self, jobs: Sequence[MaskJob], patience_s: float) -> list[MaskJob]:
        """Queue masks, and return the masks that are expected in time."""
        # The slowest come last, so that an exhausted budget ends these.
        ordered = sorted(jobs, key=lambda job: job.expected_s or 0.0)
        room_s = dict.fromkeys((job.tenant for job in jobs), patience_s * self._num_threads)
        quick = []
        for job in ordered:
            room_s[job.tenant] -= job.expected_s or 0.0
            has_costly = job.tenant in self._costly and not job.is_cheap
            if has_costly or room_s[job.tenant] < 0.0 or (job.expected_s or 0.0) > patience_s / 2:
                self._queue_costly(job)
            else:
                quick.append(job)
        self._quick.extend(quick)
        return quick

    def _queue_costly(self, job: MaskJob) -> None:
        if job.tenant in self._costly:
            self._costly[job.tenant].append(job)
            return
        self._costly[job.tenant] = deque((job,))
        try:
            _start_thread(lambda: self._make_costly(job.tenant, is_low=False))
        except (RuntimeError, MemoryError):
            # No memory for its stack: a quick thread makes it.
            del self._costly[job.tenant]
            self._quick.append(job)
            self._has_quick.notify()

    def _set_aside(self, allowed_s: float) -> None:
        """Continue masks that have taken `allowed_s` at low priority, while others run."""
        for thread_id, job in self._running.items():
            if job.is_costly or job.timer is None or job.timer.cpu_s() <= allowed_s:
                continue
            try:
                # In its place, since a thread cannot raise its priority again.
                _start_thread(lambda: self._make_quick(None))
            except (RuntimeError, MemoryError):
                return
            job.is_costly = True
            lower_priority(thread_id, _NICENESS)
            queue = self._costly.setdefault(job.tenant, deque())
            queue += [one for one in self._quick if one.tenant == job.tenant and not one.is_cheap]
            self._quick = deque(one for one in self._quick if one not in queue)

    def _slow_down(self) -> None:
        """Continue the slowest masks at the lowest priority."""
        for thread_id, job in self._running.items():
            if job.is_costly and job.timer is not None and job.timer.cpu_s() > _SLOW_S:
                lower_priority(thread_id, _SLOW_NICENESS)

    def _make_quick(self, all_run: threading.Barrier | None) -> None:
        if all_run is not None:
            all_run.wait()
        while True:
            with self._lock:
                self._has_quick.wait_for(lambda: self._quick)
                job = self._quick.popleft()
                self._running[threading.get_native_id()] = job
            self._make(job)
            if job.is_costly:
                self._make_costly(job.tenant, is_low=True)
                return

    def _make_costly(self, tenant: str, *, is_low: bool) -> None:
        """Make the costly masks of a tenant until there are none."""
        thread_id = threading.get_native_id()
        if not is_low:
            lower_priority(thread_id, _NICENESS)
        while True:
            with self._lock:
                queue = self._costly.get(tenant)
                if not queue:
                    # Another thread of the tenant may have found that first.
                    self._costly.pop(tenant, None)
                    return
                job = queue.popleft()
                job.is_costly = True
                self._running[thread_id] = job
            if job.expected_s is not None and job.expected_s > _SLOW_S:
                lower_priority(thread_id, _SLOW_NICENESS)
            self._make(job)

    def _make(self, job: MaskJob) -> None:
        """Make a mask, and send it unless `make_masks` returns it."""
        made = None
        try:
            if not job.is_cancelled:
                made = job.make()
        except BaseException as error:
            # The sequence of a cancelled job has no budget anymore.
            if not job.is_cancelled or is_out_of_memory(error):
                if job.is_alone and is_out_of_memory(error):
                    self._send([job.failed("its mask ran out of memory")])
                # The cause may be another sequence; the client finds it.
                os._exit(1)
        with self._lock:
            job.made = made
            del self._running[threading.get_native_id()]
            is_awaited = job in self._awaited
            self._num_awaited -= is_awaited
            if is_awaited and not self._num_awaited:
                self._has_made.notify()
        if made is not None and not (is_awaited or job.is_cancelled):
            self._send([made])

    def _left_costly(self) -> list[MaskJob]:
        return [job for queue in self._costly.values() for job in queue]


def _made(jobs: Collection[MaskJob]) -> list[MadeMask]:
    return [job.made for job in jobs if job.made is not None]


def _start_thread(run: Callable[[], object]) -> None:
    threading.Thread(target=run, daemon=True).start()
