"""The process that makes masks: a fork of the compiler process, which cannot harm the replica.

The process gets queries on one socket and grammars on another. Several threads answer queries,
since xgrammar releases the GIL. A thread inside xgrammar cannot be interrupted, so a thread with a
costly mask continues at low priority while another thread takes its place. The process exits when a
socket closes, or when a mask takes too long or all memory.
"""

from __future__ import annotations

import heapq
import math
import os
import resource
import signal
import threading
import time
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from cluster.structured.child_process import (
    is_out_of_memory,
    limit_memory,
    read_message,
    write_frame,
)
from cluster.structured.messages import (
    GrammarLoaded,
    LoadFailed,
    LoadGrammar,
    MadeMask,
    MaskReply,
    StepQuery,
)
from cluster.structured.sequence_matcher import BASE_CPU_S, SequenceMatcher, allowed_cpu_s
from cluster.structured.token_matchers import (
    FreeMatcher,
    MarkMatcher,
    ReasoningBudget,
    ReasoningMatcher,
)
from pagedray.machine import lower_priority
from pagedray.request import FinishReason

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Sequence

    from cluster.structured.messages import MaskQuery, MatcherStart
    from cluster.structured.sequence_matcher import DraftMasks
    from cluster.structured.token_matchers import TextMatcher, TokenMatcher
    from cluster.structured.xgrammar_library import XGrammarLibrary

__all__ = ["serve_masks"]

_AFTER_ALL_S = math.inf
"""The place of masks behind drafts among masks by CPU time: no other mask waits for them."""
_MAX_THREADS = 8
_NUM_COSTLY_THREADS = 2
_COSTLY_S = 0.005
"""CPU time of a mask that continues at low priority, even if no step waits for others."""
_NICENESS = 10
"""Priority of costly masks, for which no step waits; they still get a tenth of a busy core."""
_CHECK_INTERVAL_S = 0.05
"""Time between two checks of the limits of masks that are being made."""
_HANG_S = 5.0
"""Time after which the kernel kills the process if a mask keeps it from reading its clock."""


def serve_masks(
    masks: socket.socket, grammars: socket.socket, library: XGrammarLibrary, *, memory_bytes: int
) -> None:
    """Serve until the other end of a socket closes, with `memory_bytes` more memory than now."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    server = _MaskServer(library, masks)
    limit_memory(memory_bytes)
    _start_thread(lambda: _serve_grammars(grammars, server))
    _start_thread(server.watch)
    steps: SimpleQueue[StepQuery] = SimpleQueue()
    _start_thread(lambda: _read_steps(masks, steps))
    try:
        while True:
            server.answer(steps.get())
    except (OSError, MemoryError):
        return


def _read_steps(connection: socket.socket, steps: SimpleQueue[StepQuery]) -> None:
    """Read queries at once, so that the replica never waits to send a query."""
    try:
        while True:
            steps.put(read_message(connection, StepQuery))
    finally:
        # Without the clean-up of the parent's objects.
        os._exit(0)


def _serve_grammars(connection: socket.socket, server: _MaskServer) -> None:
    try:
        while True:
            write_frame(connection, msgspec.msgpack.encode(_load_next(connection, server)))
    finally:
        # Without the clean-up of the parent's objects.
        os._exit(0)


def _load_next(connection: socket.socket, server: _MaskServer) -> GrammarLoaded | LoadFailed:
    """Return the reply to the next message; its text is freed before the reply is written."""
    try:
        load = read_message(connection, LoadGrammar)
        return GrammarLoaded(server.load_grammar(load))
    except (RuntimeError, MemoryError) as error:
        text = " ".join(str(error).split())[:200]
        return LoadFailed(text, is_out_of_memory(error))


def _start_thread(run: Callable[[], object]) -> None:
    threading.Thread(target=run, daemon=True).start()


class _MaskServer:
    """The loaded grammars and the matchers of sequences."""

    def __init__(self, library: XGrammarLibrary, connection: socket.socket) -> None:
        self._library = library
        self._connection = connection
        # Any: the library's own type.
        self._grammars: dict[int, Any] = {}
        """None for grammars that allow every token."""
        self._last_s: dict[int, float] = {}
        """CPU time of the last mask of each grammar."""
        self._sequence_ids: set[int] = set()
        """Sequences that have not ended."""
        self._matchers: dict[int, SequenceMatcher] = {}
        self._lock = threading.Lock()
        """Held to change the two fields above."""
        self._work = MaskWork(min(_MAX_THREADS, len(os.sched_getaffinity(0))), self._send)
        self._send_lock = threading.Lock()
        """Held by the thread that sends, one of several."""

    def load_grammar(self, load: LoadGrammar) -> int:
        """Load a grammar; return its size in bytes. Raises RuntimeError."""
        self._remove_grammars(load.ended_grammar_ids)
        given = load.grammar
        if not given.text:
            self._grammars[load.grammar_id] = None
            return 0
        text = given.text.decode()
        read = self._library.load_grammar if given.is_compiled else self._library.compile_alone
        compiled, num_bytes = read(text)
        self._grammars[load.grammar_id] = compiled
        return num_bytes

    def answer(self, step: StepQuery) -> None:
        """Make masks and send the quick masks. Raises OSError, MemoryError or RuntimeError."""
        signal.setitimer(signal.ITIMER_REAL, _HANG_S)
        with self._lock:
            self._sequence_ids.difference_update(step.ended_sequence_ids)
            self._sequence_ids.update(one.sequence_id for one in step.queries if one.start)
            for sequence_id in step.ended_sequence_ids:
                self._matchers.pop(sequence_id, None)
        self._remove_grammars(step.ended_grammar_ids)
        jobs = [MaskJob(query, self._make, self._expected_s(query)) for query in step.queries]
        made = self._work.make_masks(jobs, step.patience_s)
        if made:
            self._send(made)

    def watch(self) -> None:
        """End the process if a mask takes too long. Never returns."""
        try:
            while True:
                time.sleep(_CHECK_INTERVAL_S)
                # The kernel's limit, for a mask that keeps the GIL from this thread.
                signal.setitimer(signal.ITIMER_REAL, 0.0 if self._work.is_idle else _HANG_S)
                made = self._work.check_limits()
                if made:
                    # The replica may read late.
                    signal.setitimer(signal.ITIMER_REAL, 0.0)
                    self._send(made)
        finally:
            os._exit(0)

    def _send(self, masks: list[MadeMask]) -> None:
        is_last = any(mask.is_offender for mask in masks)
        with self._send_lock:
            write_frame(self._connection, msgspec.msgpack.encode(MaskReply(masks, is_last)))
            if is_last:
                # Without the clean-up of the parent's objects.
                os._exit(0)

    def _remove_grammars(self, grammar_ids: list[int]) -> None:
        for grammar_id in grammar_ids:
            self._grammars.pop(grammar_id, None)
            self._last_s.pop(grammar_id, None)

    def _expected_s(self, query: MaskQuery) -> float:
        if query.start is not None:
            return self._last_s.get(query.start.grammar_id, 0.0)
        matcher = self._matchers.get(query.sequence_id)
        return 0.0 if matcher is None else matcher.last_cpu_s

    def _make(self, query: MaskQuery) -> tuple[MadeMask | None, DraftMasks | None]:
        """Return a mask, and how to make masks behind drafts; None if the sequence has ended.

        Raises MemoryError or RuntimeError.
        """
        matcher = self._matcher_of(query)
        if matcher is None:
            return None, None
        words = np.zeros((1, self._library.num_mask_words), dtype=np.int32)
        end = matcher.write_mask(query.token_ids, words, 0)
        self._last_s[matcher.grammar_id] = matcher.last_cpu_s
        drafts = None
        if end is None and (query.draft_ids or query.num_forced):
            drafts = matcher.draft_masks(query, words[0], self._library.index)
        made = MadeMask(
            query.sequence_id,
            matcher.cpu_s,
            matcher.last_cpu_s,
            words.tobytes() if end is None else b"",
            end,
            matcher.error if end is FinishReason.ERROR else "",
            is_free=end is None and matcher.is_free,
        )
        return made, drafts

    def _matcher_of(self, query: MaskQuery) -> SequenceMatcher | None:
        """Return the matcher of a sequence, or None if the sequence or its grammar has ended."""
        start = query.start
        if start is None:
            return self._matchers.get(query.sequence_id)
        try:
            compiled = self._grammars[start.grammar_id]
        except KeyError:
            # The end of the sequence is sent later, since it comes with queries only.
            return None
        vocab_size = self._library.vocab_size
        matcher = SequenceMatcher(self._turn_matcher(compiled, start), start, vocab_size)
        with self._lock:
            if query.sequence_id not in self._sequence_ids:
                return None
            self._matchers[query.sequence_id] = matcher
        return matcher

    # Any: the library's own type.
    def _turn_matcher(self, compiled: Any, start: MatcherStart) -> TokenMatcher:
        matcher = self._grammar_matcher(compiled, start)
        if start.reasoning is None or start.reasoning_budget is None:
            return matcher
        return ReasoningBudget(
            matcher, start.reasoning, self._library.index, max_tokens=start.reasoning_budget
        )

    # Any: the library's own type.
    def _grammar_matcher(self, compiled: Any, start: MatcherStart) -> TokenMatcher:
        if compiled is None:
            return FreeMatcher()
        found = self._library.matcher(compiled)
        matcher: TextMatcher = found
        mark_id = self._library.special_token_ids.get(start.mark) if start.mark else None
        if mark_id is not None:
            index = self._library.index if start.has_text_before_mark else None
            matcher = MarkMatcher(found, mark_id, start.mark, text_index=index)
        if start.reasoning is None:
            return matcher
        return ReasoningMatcher(
            matcher, start.reasoning, self._library.index, eos_token_ids=start.eos_token_ids
        )


class MaskWork:
    """Makes masks in threads of its own, the cheapest first, and costly masks at low priority."""

    def __init__(self, num_threads: int, send: Callable[[list[MadeMask]], None]) -> None:
        """`send` gets masks that `make_masks` did not wait for."""
        self._send = send
        self._lock = threading.Lock()
        """Held to access everything below."""
        self._has_quick = threading.Condition(self._lock)
        self._has_costly = threading.Condition(self._lock)
        self._has_made = threading.Condition(self._lock)
        """Notified when all masks that `make_masks` waits for are made."""
        self._numbers = count()
        self._quick: list[tuple[float, int, MaskJob]] = []
        self._costly: list[tuple[float, int, MaskJob]] = []
        self._running: dict[int, MaskJob] = {}
        """Jobs by the thread that runs them."""
        self._awaited: list[MaskJob] = []
        """The masks that `make_masks` waits for."""
        self._num_awaited = 0
        """How many of them are not made yet."""
        # A thread started later might find no memory for its stack.
        all_run = threading.Barrier(num_threads + _NUM_COSTLY_THREADS + 1)
        for _ in range(num_threads):
            _start_thread(lambda: self._make_quick(all_run))
        for _ in range(_NUM_COSTLY_THREADS):
            _start_thread(lambda: self._make_costly(all_run))
        all_run.wait()

    @property
    def is_idle(self) -> bool:
        """Whether all masks are made."""
        return not (self._running or self._quick or self._costly)

    def make_masks(self, jobs: Sequence[MaskJob], patience_s: float) -> list[MadeMask]:
        """Return the finished masks once all quick masks are made, or after `patience_s`.

        Masks behind drafts that are not made by then are not made.
        """
        with self._lock:
            for job in jobs:
                job.is_alone = len(jobs) == 1 and self.is_idle
                if job.expected_s <= patience_s / 2:
                    self._awaited.append(job)
                    heapq.heappush(self._quick, (job.expected_s, next(self._numbers), job))
                    self._has_quick.notify()
                else:
                    job.is_costly = True
                    heapq.heappush(self._costly, (0.0, next(self._numbers), job))
                    self._has_costly.notify()
            quick, self._num_awaited = self._awaited, len(self._awaited)
            self._has_made.wait_for(lambda: not self._num_awaited, patience_s)
            self._awaited, self._num_awaited = [], 0
            for job in quick:
                job.stop_drafts()
            self._set_aside(patience_s / 2)
            return _made(quick)

    def check_limits(self) -> list[MadeMask]:
        """Return how sequences with overlong masks end, and the masks not returned yet.

        It returns nothing if no mask takes too long.
        """
        with self._lock:
            self._set_aside(_COSTLY_S)
            offenders = [
                job.failed(f"its mask took {job.cpu_s:.2f} s of CPU time")
                for job in self._running.values()
                if job.is_over
            ]
            return [*_made(self._awaited), *offenders] if offenders else []

    def _set_aside(self, allowed_s: float) -> None:
        """Continue masks that have taken `allowed_s` at low priority, while others run."""
        for thread_id, job in self._running.items():
            if job.is_costly or job.cpu_s <= allowed_s or job.ends_early():
                continue
            try:
                # In its place, since a thread cannot raise its priority again.
                _start_thread(lambda: self._make_quick(None))
            except (RuntimeError, MemoryError):
                return
            job.is_costly = True
            lower_priority(thread_id, _NICENESS)

    def _make_quick(self, all_run: threading.Barrier | None) -> None:
        if all_run is not None:
            all_run.wait()
        while not self._make_next(self._quick, self._has_quick).is_costly:
            pass

    def _make_costly(self, all_run: threading.Barrier) -> None:
        all_run.wait()
        lower_priority(threading.get_native_id(), _NICENESS)
        while True:
            self._make_next(self._costly, self._has_costly)

    def _make_next(
        self, queue: list[tuple[float, int, MaskJob]], has_jobs: threading.Condition
    ) -> MaskJob:
        """Make a mask, and send it unless `make_masks` returns it."""
        thread_id = threading.get_native_id()
        with self._lock:
            has_jobs.wait_for(lambda: queue)
            *_, job = heapq.heappop(queue)
            self._running[thread_id] = job
        try:
            made = job.make()
        except BaseException as error:
            if job.is_alone and is_out_of_memory(error):
                self._send([job.failed("its mask ran out of memory")])
            # The cause may be another sequence; the client finds it.
            os._exit(1)
        with self._lock:
            job.made = made
            del self._running[thread_id]
            is_awaited = job in self._awaited
            if is_awaited and job.drafts is not None:
                drafts_job = DraftsJob(job, job.drafts)
                self._awaited.append(drafts_job)
                self._num_awaited += 1
                heapq.heappush(self._quick, (_AFTER_ALL_S, next(self._numbers), drafts_job))
                self._has_quick.notify()
            self._num_awaited -= is_awaited
            if is_awaited and not self._num_awaited:
                self._has_made.notify()
        if made is not None and not is_awaited:
            self._send([made])
        return job


def _made(jobs: Iterable[MaskJob]) -> list[MadeMask]:
    return [job.with_drafts(job.made) for job in jobs if job.made is not None]


class MaskJob:
    """One mask to be made."""

    def __init__(
        self,
        query: MaskQuery,
        make: Callable[[MaskQuery], tuple[MadeMask | None, DraftMasks | None]],
        expected_s: float = 0.0,
    ) -> None:
        """`make` returns no mask for a sequence that has ended. `expected_s` is the CPU time."""
        self.expected_s = expected_s
        self.made: MadeMask | None = None
        self.drafts: DraftMasks | None = None
        """How to make the masks behind drafts, once the mask is made."""
        self.is_costly = False
        """Whether its thread has low priority."""
        self.is_alone = False
        """Whether no other mask was to be made when it was requested."""
        self.query = query
        self._make = make
        self._clock: int | None = None
        self._began_s = 0.0

    @property
    def cpu_s(self) -> float:
        """The CPU time taken so far."""
        return 0.0 if self._clock is None else time.clock_gettime(self._clock) - self._began_s

    @property
    def is_over(self) -> bool:
        """Whether the mask takes too long."""
        return self.cpu_s > BASE_CPU_S + allowed_cpu_s(self.query)

    def make(self) -> MadeMask | None:
        """Make the mask in the calling thread, unless its sequence has ended."""
        self._began_s = time.thread_time()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        made, self.drafts = self._make(self.query)
        return made

    def with_drafts(self, made: MadeMask) -> MadeMask:
        """Return a mask with the masks behind drafts that are made."""
        if self.drafts is None:
            return made
        words, forced_ids = b"".join((made.words, *self.drafts.masks)), self.drafts.forced_ids
        return replace(made, words=words, forced_ids=forced_ids)

    def stop_drafts(self) -> None:
        """Make no other masks behind drafts."""
        if self.drafts is not None:
            self.drafts.is_stopped = True

    def ends_early(self) -> bool:
        """Return whether it ends soon although it has not made all masks."""
        return False

    def failed(self, error: str) -> MadeMask:
        """Return the end of its sequence, which ends the process, too."""
        return MadeMask(
            self.query.sequence_id,
            0.0,
            0.0,
            finish_reason=FinishReason.ERROR,
            error=error,
            is_offender=True,
        )


class DraftsJob(MaskJob):
    """The masks behind the drafts of a sequence, which are part of another job's result."""

    def __init__(self, job: MaskJob, drafts: DraftMasks) -> None:
        """Make masks once the masks of `job` are made."""

        def make(query: MaskQuery) -> tuple[None, None]:
            drafts.make()
            return None, None

        super().__init__(job.query, make)
        self.is_alone = job.is_alone
        self._masks = drafts

    @property
    def is_over(self) -> bool:
        """Whether a mask takes too long."""
        return self.cpu_s > BASE_CPU_S

    def ends_early(self) -> bool:
        """Make no more masks; return False if the last of them takes long by itself."""
        was_stopped, self._masks.is_stopped = self._masks.is_stopped, True
        return not was_stopped

    def failed(self, error: str) -> MadeMask:
        """Return that the masks end the process, which is no fault of the sequence."""
        return MadeMask(self.query.sequence_id, 0.0, 0.0, is_offender=True)
