"""The process that makes masks: a fork of the compiler process, which cannot harm the replica.

It has two sockets. On one it gets the queries of a step, which several threads answer, since
xgrammar releases Python's lock. On the other it gets grammars at the same time. It exits when
either closes, or when a sequence delays the others for too long or takes all memory.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from cluster.structured.processes.cpu_budgets import TenantCpuBudgets
from cluster.structured.processes.frames import read_message, write_frame
from cluster.structured.processes.mask_batch import CHECK_INTERVAL_S, MaskBatch
from cluster.structured.processes.memory_limit import is_out_of_memory, limit_memory
from cluster.structured.processes.messages import GrammarLoaded, LoadFailed, LoadGrammar, StepQuery
from cluster.structured.processes.sequence_matcher import SequenceMatcher

if TYPE_CHECKING:
    import socket

    from cluster.structured.processes.messages import MaskQuery, StepReply
    from cluster.structured.processes.xgrammar_library import XGrammarLibrary

__all__ = ["serve_masks"]

_MAX_THREADS = 8


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
            query = read_message(masks, StepQuery)
            # The kernel's limit, for a sequence that keeps Python's lock from the watching thread.
            signal.setitimer(signal.ITIMER_REAL, query.limit_s)
            server.answer_step(query)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
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
        self._matchers: dict[int, SequenceMatcher] = {}
        self._budgets = TenantCpuBudgets()
        self._num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._threads = _started_threads(self._num_threads)
        self._words = np.zeros((0, library.num_mask_words), dtype=np.int32)
        self._batch: MaskBatch | None = None
        self._reply_lock = threading.Lock()
        """Held by the thread that replies: the one that makes masks or the one that watches."""

    def load_grammar(self, load: LoadGrammar) -> int:
        """Load a grammar; return its size in bytes. Raises RuntimeError."""
        self._remove_grammars(load.ended_grammar_ids)
        compiled, num_bytes = self._library.load_grammar(load.text.decode())
        self._grammars[load.grammar_id] = compiled
        return num_bytes

    def answer_step(self, step: StepQuery) -> None:
        """Make the masks of a step and send them. Raises OSError, MemoryError or RuntimeError."""
        for sequence_id in step.ended_sequence_ids:
            self._matchers.pop(sequence_id, None)
        self._budgets.remove_sequences(step.ended_sequence_ids)
        for query in step.queries:
            if query.start is not None:
                self._budgets.add_sequence(query.sequence_id, query.start.tenant)
        self._budgets.begin_step(query.sequence_id for query in step.queries)
        self._remove_grammars(step.ended_grammar_ids)
        num_queries = len(step.queries)
        if num_queries > len(self._words):
            self._words = np.zeros((num_queries, self._library.num_mask_words), dtype=np.int32)
        words = self._words[:num_queries]
        words[:] = 0
        batch = self._batch = MaskBatch(step.queries, words, self._matcher_of, self._cost_of)
        reply = batch.make_masks(self._threads, self._num_threads)
        with self._reply_lock:
            self._batch = None
            self._send(reply)

    def watch(self) -> None:
        """Reply in place of a step that takes too long. Never returns."""
        try:
            while True:
                time.sleep(CHECK_INTERVAL_S)
                with self._reply_lock:
                    reply = None if self._batch is None else self._batch.check_timeouts()
                    if reply is not None:
                        self._send(reply)
        finally:
            os._exit(0)

    def _send(self, reply: StepReply) -> None:
        write_frame(self._connection, msgspec.msgpack.encode(reply))
        if reply.offenders:
            # Without the clean-up of the parent's objects.
            os._exit(0)

    def _remove_grammars(self, grammar_ids: list[int]) -> None:
        for grammar_id in grammar_ids:
            self._grammars.pop(grammar_id, None)

    def _cost_of(self, query: MaskQuery) -> float:
        matcher = self._matchers.get(query.sequence_id)
        return 0.0 if matcher is None else matcher.last_cpu_s

    def _matcher_of(self, query: MaskQuery) -> SequenceMatcher:
        if query.start is not None:
            self._matchers[query.sequence_id] = SequenceMatcher(
                self._library.matcher(self._grammars[query.start.grammar_id]),
                query.start,
                self._library.vocab_size,
                lambda: self._budgets.budget_of(query.sequence_id),
            )
        return self._matchers[query.sequence_id]


def _started_threads(num_threads: int) -> ThreadPoolExecutor:
    """Return running threads: one started later might find no memory for its stack."""
    threads = ThreadPoolExecutor(num_threads)
    all_run = threading.Barrier(num_threads)
    for _ in range(num_threads):
        threads.submit(all_run.wait)
    return threads
