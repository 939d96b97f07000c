"""The masks being made: quick masks by a few threads, costly masks by others.

A thread inside xgrammar cannot be interrupted. So a thread with a costly mask continues at low
priority, and another thread takes its place; each tenant has at most one such thread at a time,
which makes its other costly masks, too. A mask that takes too long altogether ends its sequence and
the process.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cluster.structured.child_process import is_out_of_memory
from cluster.structured.messages import REJECTED_TOKEN, MadeMask
from pagedray.machine import lower_priority
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from cluster.structured.messages import MaskQuery, MatcherStart
    from cluster.structured.token_matchers import TokenMatcher

__all__ = [
    "CHECK_INTERVAL_S",
    "CpuBudget",
    "MaskJob",
    "MaskWork",
    "SequenceMatcher",
    "TenantCpuBudgets",
    "allowed_cpu_s",
]

_COSTLY_S = 0.005
"""CPU time of a mask that continues at low priority, even if no step waits for others."""
_NICENESS = 10
"""Priority of costly masks, for which no step waits; they still get a tenth of a busy core."""
_SLOW_S = 0.01
"""CPU time of a mask that continues at the lowest priority, a seventieth of a busy core."""
_SLOW_NICENESS = 19

CHECK_INTERVAL_S = 0.05
"""Time between two checks of the limits of masks that are being made."""
_CHEAP_S = 0.001
"""CPU time of masks that are made before others, even of a tenant with costly masks."""
_SLEEP_FACTOR = 6
"""A mask may sleep this many times its CPU time."""
_MIN_SLEEP_S = 3.0
"""A mask may sleep at least this long, waiting for the GIL on a busy machine."""
BASE_CPU_S = 0.5
"""CPU time that a sequence may take for its masks, in addition to that of its tokens."""
_TOKEN_CPU_S = 0.01
"""CPU time that each token allows."""
_REPLAYED_TOKEN_CPU_S = 0.0001
"""CPU time that a replayed token allows, in addition to the sequence's earlier time."""
_BUDGET_ERROR = "the CPU time for masks of its tenant is exhausted"
_STEP_S = 0.01
"""CPU time that a step adds to a budget."""
_ROW_S = 0.003
"""CPU time that each row of the tenant in the step adds.

A JSON schema takes 0.1 to 0.3 ms, and up to 2.4 ms where a limited string is near its end.
"""
_IDLE_SHARE = 0.1
"""CPU time that a second adds, so that a tenant recovers after its sequences have ended."""
_BURST_S = 0.5
"""The largest balance, not counting its rows; and the largest debt."""
_RECOVERY_S = 2 * _BURST_S / _IDLE_SHARE


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


def allowed_cpu_s(query: MaskQuery) -> float:
    """Return the CPU time that the tokens of a query allow.

    To replay tokens to a new process takes 1 to 5 us each, or, for an ambiguous grammar, about as
    long as they took the first time, most of which is not making masks.
    """
    if query.start is None:
        return _TOKEN_CPU_S * len(query.token_ids)
    return _REPLAYED_TOKEN_CPU_S * len(query.token_ids) + query.start.cpu_s


class SequenceMatcher:
    """Follows one sequence through its grammar, within limits of CPU time."""

    def __init__(
        self,
        matcher: TokenMatcher,
        start: MatcherStart,
        vocab_size: int,
        budget_of: Callable[[], CpuBudget],
    ) -> None:
        """`budget_of` returns the budget that the current step is charged to."""
        self._matcher = matcher
        self._budget_of = budget_of
        self._min_tokens = start.min_tokens
        self._num_tokens = 0
        has_eos = start.ignores_eos and start.eos_token_ids
        self._eos = _bits(start.eos_token_ids, vocab_size) if has_eos else None
        self._early = (
            _bits((*start.eos_token_ids, *start.stop_token_ids), vocab_size)
            if start.min_tokens
            else None
        )
        self._was_queried = False
        self.cpu_s = start.cpu_s
        """CPU time taken in total."""
        self.last_cpu_s = 0.0
        """CPU time of the last mask."""
        self._finish_reason: FinishReason | None = None
        self.error = ""
        """Why the sequence ended with an error; empty if it did not."""

    @property
    def is_free(self) -> bool:
        """Whether the sequence needs no other mask: every token is allowed from here on."""
        is_long = self._num_tokens >= self._min_tokens
        return is_long and self._eos is None and self._matcher.is_free

    def write_mask(
        self, token_ids: list[int], masks: NDArray[np.int32], row: int
    ) -> FinishReason | None:
        """Accept tokens and write the mask of the next token, or return how the sequence ends.

        `masks` is `[num_rows, ceil(vocab_size / 32)]`; the row is all zero. Raises only errors of
        memory, which another sequence may have caused.
        """
        if self._finish_reason is not None:
            return self._finish_reason
        budget = self._budget_of()
        if budget.is_exhausted:
            self._finish_reason = self._failed(_BUDGET_ERROR)
            return self._finish_reason
        started_s = time.thread_time()
        try:
            found = self._next(token_ids, masks, row)
        # Whatever the library raises for one grammar must not affect the others.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            found = self._failed(f"the grammar failed: {error!r:.200}")
        took_s = time.thread_time() - started_s
        # Replayed tokens were charged before.
        cpu_s = self.cpu_s + took_s if self._was_queried else max(self.cpu_s, took_s)
        self.last_cpu_s, self.cpu_s = cpu_s - self.cpu_s, cpu_s
        self._was_queried = True
        budget.charge(self.last_cpu_s)
        if found is None and budget.is_exhausted:
            found = self._failed(_BUDGET_ERROR)
        if self.cpu_s > BASE_CPU_S + _TOKEN_CPU_S * self._num_tokens:
            found = self._failed(
                f"its masks took {self.cpu_s:.2f} s of CPU time for {self._num_tokens} tokens"
            )
        self._finish_reason = found
        return found

    def _next(
        self, token_ids: list[int], masks: NDArray[np.int32], row: int
    ) -> FinishReason | None:
        for token_id in token_ids:
            if not self._matcher.accept_token(token_id):
                return self._failed(REJECTED_TOKEN)
        self._num_tokens += len(token_ids)
        self._matcher.write_mask(masks, row)
        words = masks[row]
        if self._eos is not None:
            words &= ~self._eos
        if not words.any():
            if self._matcher.is_complete:
                return FinishReason.STOP
            return self._failed("the grammar allows no further token")
        if self._early is not None and self._num_tokens < self._min_tokens:
            later = words & ~self._early
            # Where the grammar allows nothing but an end, it takes precedence over min_tokens.
            if later.any():
                words[:] = later
        return None

    def _failed(self, error: str) -> FinishReason:
        self.error = error
        return FinishReason.ERROR


def _bits(token_ids: Iterable[int], size: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    bits[[token_id for token_id in token_ids if token_id < size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class CpuBudget:
    """The CPU time left to one tenant. Any thread may charge it."""

    def __init__(self, now_s: float) -> None:
        self._left_s = _BURST_S
        self._filled_s = now_s
        self._lock = threading.Lock()
        self.last_mask_s: float | None = None
        """CPU time of the last mask that was charged."""

    @property
    def is_exhausted(self) -> bool:
        """Whether the tenant took more than it had."""
        return self._left_s < 0.0

    def charge(self, cpu_s: float) -> None:
        """Subtract seconds of CPU time."""
        with self._lock:
            self._left_s = max(self._left_s - cpu_s, -_BURST_S)
            self.last_mask_s = cpu_s

    def refill(self, num_rows: int, now_s: float) -> None:
        """Add the CPU time of a step with this many rows of the tenant."""
        rows_s = _ROW_S * num_rows
        added_s = _STEP_S + rows_s + _IDLE_SHARE * (now_s - self._filled_s)
        with self._lock:
            self._left_s = min(self._left_s + added_s, _BURST_S + rows_s)
        self._filled_s = now_s

    def has_recovered(self, now_s: float) -> bool:
        """Return whether the time since the last step alone has filled it."""
        return now_s - self._filled_s >= _RECOVERY_S


class TenantCpuBudgets:
    """The budgets of tenants with sequences, or with sequences a short time ago."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._budgets: dict[str, CpuBudget] = {}
        self._tenants: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._budgets)

    def add_sequence(self, sequence_id: int, tenant: str) -> None:
        """Charge a sequence to its tenant."""
        self._tenants[sequence_id] = tenant

    def remove_sequences(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        for sequence_id in sequence_ids:
            self._tenants.pop(sequence_id, None)

    def begin_step(self, sequence_ids: Iterable[int]) -> None:
        """Refill the budgets of these sequences' tenants; drop full budgets."""
        now_s = self._clock()
        num_rows = Counter(self._tenants[sequence_id] for sequence_id in sequence_ids)
        for tenant, number in num_rows.items():
            self._budgets.setdefault(tenant, CpuBudget(now_s)).refill(number, now_s)
        # A tenant that ends its sequences keeps its debt. A full budget is the same as none, even
        # if the tenant has sequences that wait for their next step.
        # A copy, as other threads may add budgets.
        for tenant, budget in list(self._budgets.items()):
            if budget.has_recovered(now_s):
                del self._budgets[tenant]

    def tenant_of(self, sequence_id: int) -> str:
        """Return the tenant of a sequence."""
        return self._tenants[sequence_id]

    def budget_of(self, sequence_id: int) -> CpuBudget:
        """Return the budget that a sequence is charged to."""
        # It may have recovered, and was dropped, while a mask was made.
        return self._budgets.setdefault(self.tenant_of(sequence_id), CpuBudget(self._clock()))

    def has_sequence(self, sequence_id: int) -> bool:
        """Return whether a sequence was added and has not ended."""
        return sequence_id in self._tenants
