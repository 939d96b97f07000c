"""The process that makes masks: a fork of the compiler process, which cannot harm the replica.

It has two sockets. On one it gets queries, which several threads answer, since xgrammar releases
the GIL. On the other it gets grammars at the same time. It exits when either closes, or when a mask
takes too long or all memory.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from cluster.structured.child_process import (
    has_unread_bytes,
    is_out_of_memory,
    limit_memory,
    read_message,
    write_frame,
)
from cluster.structured.mask_work import (
    CHECK_INTERVAL_S,
    MaskJob,
    MaskWork,
    SequenceMatcher,
    TenantCpuBudgets,
)
from cluster.structured.messages import (
    GrammarLoaded,
    LoadFailed,
    LoadGrammar,
    MaskReply,
    StepQuery,
)
from cluster.structured.token_matchers import (
    FreeMatcher,
    MarkMatcher,
    ReasoningBudget,
    ReasoningMatcher,
)

if TYPE_CHECKING:
    import socket

    from cluster.structured.messages import MadeMask, MaskQuery, MatcherStart
    from cluster.structured.token_matchers import TextMatcher, TokenMatcher
    from cluster.structured.xgrammar_library import XGrammarLibrary

__all__ = ["serve_masks"]

_MAX_THREADS = 8
_CHECKS_PER_REPORT = 20


def serve_masks(
    masks: socket.socket, grammars: socket.socket, library: XGrammarLibrary, *, memory_bytes: int
) -> None:
    """Serve until the other end of a socket closes, with `memory_bytes` more memory than now."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    server = _MaskServer(library, masks)
    limit_memory(memory_bytes)
    for serve in (lambda: _serve_grammars(grammars, server), server.watch):
        threading.Thread(target=serve, daemon=True).start()
    try:
        while True:
            server.answer(read_message(masks, StepQuery))
    except (OSError, EOFError, MemoryError):
        return


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


class _MaskServer:
    """The loaded grammars and the matchers of sequences."""

    def __init__(self, library: XGrammarLibrary, connection: socket.socket) -> None:
        self._library = library
        self._connection = connection
        # Any: the library's own type.
        self._grammars: dict[int, Any] = {}
        """None for grammars that allow every token."""
        self._matchers: dict[int, SequenceMatcher] = {}
        self._budgets = TenantCpuBudgets()
        self._work = MaskWork(min(_MAX_THREADS, len(os.sched_getaffinity(0))), self._send)
        self._limit_s = 0.0
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
        self._limit_s = step.limit_s
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)
        self._work.cancel(step.ended_sequence_ids)
        self._budgets.remove_sequences(step.ended_sequence_ids)
        for sequence_id in step.ended_sequence_ids:
            self._matchers.pop(sequence_id, None)
        for query in step.queries:
            if query.start is not None:
                self._budgets.add_sequence(query.sequence_id, query.start.tenant)
        self._budgets.begin_step(query.sequence_id for query in step.queries)
        self._remove_grammars(step.ended_grammar_ids)
        made = self._work.make_masks([self._job(query) for query in step.queries], step.patience_s)
        if made:
            self._send(made)

    def watch(self) -> None:
        """End the process if a mask takes too long, and report that it still makes masks.

        Never returns.
        """
        try:
            for number in count():
                time.sleep(CHECK_INTERVAL_S)
                is_idle = self._work.is_idle
                # The kernel's limit, for a mask that keeps the GIL from this thread.
                signal.setitimer(signal.ITIMER_REAL, 0.0 if is_idle else self._limit_s)
                made = self._work.check_limits()
                if made:
                    self._send(made)
                elif not is_idle and number % _CHECKS_PER_REPORT == 0:
                    self._report()
        finally:
            os._exit(0)

    def _report(self) -> None:
        """Tell the replica that masks are being made, unless it has yet to read some.

        A thread that waited for it to read would no longer set the timer.
        """
        if not self._send_lock.acquire(blocking=False):
            return
        try:
            if not has_unread_bytes(self._connection):
                write_frame(self._connection, msgspec.msgpack.encode(MaskReply([])))
        finally:
            self._send_lock.release()

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

    def _job(self, query: MaskQuery) -> MaskJob:
        matcher = self._matchers.get(query.sequence_id)
        budget = self._budgets.budget_of(query.sequence_id)
        return MaskJob(
            query,
            self._budgets.tenant_of(query.sequence_id),
            self._matcher_of,
            num_words=self._library.num_mask_words,
            expected_s=budget.last_mask_s if matcher is None else matcher.last_cpu_s,
        )

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

    def _matcher_of(self, query: MaskQuery) -> SequenceMatcher | None:
        """Return the matcher of a sequence, or None if its grammar was removed."""
        if query.start is not None:
            try:
                compiled = self._grammars[query.start.grammar_id]
            except KeyError:
                # The end of the sequence is sent later, since it comes with queries only.
                return None
            self._matchers[query.sequence_id] = SequenceMatcher(
                self._turn_matcher(compiled, query.start),
                query.start,
                self._library.vocab_size,
                lambda: self._budgets.budget_of(query.sequence_id),
            )
            if not self._budgets.has_sequence(query.sequence_id):
                # It has ended meanwhile.
                return self._matchers.pop(query.sequence_id)
        return self._matchers[query.sequence_id]
