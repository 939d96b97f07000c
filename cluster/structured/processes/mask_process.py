"""Makes masks, as a fork of the process that compiles: nothing that it does can harm the replica.

It has two sockets. On one it is asked for the masks of a step, which some threads make: xgrammar
lets go of Python's lock. On the other it is given grammars meanwhile. It ends when either closes,
and when a sequence takes so long, or so much memory, that the others are better off without it.
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

from cluster.structured.processes.follower import Follower
from cluster.structured.processes.frames import read_frame, write_frame
from cluster.structured.processes.mask_messages import AskMasks, Load, Loaded, LoadFailed
from cluster.structured.processes.mask_step import LOOK_S, MaskStep
from cluster.structured.processes.memory_limit import is_out_of_memory, limit_memory
from cluster.structured.processes.tenant_accounts import TenantAccounts

if TYPE_CHECKING:
    import socket

    from cluster.structured.processes.mask_messages import Ask, Masks
    from cluster.structured.processes.xgrammar_library import Library

__all__ = ["serve_masks"]

_MAX_THREADS = 8


def serve_masks(
    masks: socket.socket, grammars: socket.socket, library: Library, *, memory_bytes: int
) -> None:
    """Answer until the other end of a socket closes; take so much memory more than there is now."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    maker = _Maker(library, masks)
    limit_memory(memory_bytes)
    for serve in (lambda: _serve_grammars(grammars, maker), maker.look_on):
        threading.Thread(target=serve, daemon=True).start()
    try:
        while True:
            question = msgspec.msgpack.decode(read_frame(masks), type=AskMasks)
            # For what even the thread that looks on cannot see.
            signal.setitimer(signal.ITIMER_REAL, question.limit_s)
            maker.answer(question)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except (OSError, EOFError, MemoryError):
        return


def _serve_grammars(connection: socket.socket, maker: _Maker) -> None:
    try:
        while True:
            write_frame(connection, msgspec.msgpack.encode(_loaded(connection, maker)))
    finally:
        # No clean-up of what is the parent's.
        os._exit(0)


def _loaded(connection: socket.socket, maker: _Maker) -> Loaded | LoadFailed:
    """Return what became of the next grammar; its text is held no longer."""
    try:
        return Loaded(maker.load(msgspec.msgpack.decode(read_frame(connection), type=Load)))
    except (RuntimeError, MemoryError) as error:
        text = " ".join(str(error).split())[:200]
        return LoadFailed(text, is_out_of_memory(error))


class _Maker:
    """The grammars and the sequences that follow them."""

    def __init__(self, library: Library, connection: socket.socket) -> None:
        self._library = library
        self._connection = connection
        # Any: the library's own.
        self._grammars: dict[int, Any] = {}
        self._followers: dict[int, Follower] = {}
        self._accounts = TenantAccounts()
        self._num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._threads = _started_threads(self._num_threads)
        self._words = np.zeros((0, library.num_mask_words), dtype=np.int32)
        self._step: MaskStep | None = None
        self._answering = threading.Lock()
        """Held by who answers: the thread that makes masks, or the one that looks on."""

    def load(self, load: Load) -> int:
        """Keep a grammar; return its size in bytes. Raises RuntimeError."""
        self._forget(load.ended_grammar_ids)
        compiled, num_bytes = self._library.load(load.text.decode())
        self._grammars[load.grammar_id] = compiled
        return num_bytes

    def answer(self, question: AskMasks) -> None:
        """Make the masks of a step and write them. Raises OSError, MemoryError or RuntimeError."""
        for sequence_id in question.ended_sequence_ids:
            self._followers.pop(sequence_id, None)
        self._accounts.forget(question.ended_sequence_ids)
        for ask in question.asks:
            if ask.follow is not None:
                self._accounts.add(ask.sequence_id, ask.follow.tenant)
        self._accounts.begin_step(ask.sequence_id for ask in question.asks)
        self._forget(question.ended_grammar_ids)
        num_asks = len(question.asks)
        if num_asks > len(self._words):
            self._words = np.zeros((num_asks, self._library.num_mask_words), dtype=np.int32)
        words = self._words[:num_asks]
        words[:] = 0
        step = self._step = MaskStep(question.asks, words, self._follower, self._cost)
        answer = step.run(self._threads, self._num_threads)
        with self._answering:
            self._step = None
            self._write(answer)

    def look_on(self) -> None:
        """Answer in the place of a step that takes too long. Never returns."""
        try:
            while True:
                time.sleep(LOOK_S)
                with self._answering:
                    answer = None if self._step is None else self._step.look()
                    if answer is not None:
                        self._write(answer)
        finally:
            os._exit(0)

    def _write(self, answer: Masks) -> None:
        write_frame(self._connection, msgspec.msgpack.encode(answer))
        if answer.culprits:
            # No clean-up of what is the parent's.
            os._exit(0)

    def _forget(self, grammar_ids: list[int]) -> None:
        for grammar_id in grammar_ids:
            self._grammars.pop(grammar_id, None)

    def _cost(self, ask: Ask) -> float:
        follower = self._followers.get(ask.sequence_id)
        return 0.0 if follower is None else follower.last_s

    def _follower(self, ask: Ask) -> Follower:
        if ask.follow is not None:
            walk = self._library.walk(self._grammars[ask.follow.grammar_id])
            self._followers[ask.sequence_id] = Follower(
                walk,
                ask.follow,
                self._library.vocab_size,
                lambda: self._accounts.of(ask.sequence_id),
            )
        return self._followers[ask.sequence_id]


def _started_threads(num_threads: int) -> ThreadPoolExecutor:
    """Return threads that run: one that is started later may find no memory for its stack."""
    threads = ThreadPoolExecutor(num_threads)
    all_run = threading.Barrier(num_threads)
    for _ in range(num_threads):
        threads.submit(all_run.wait)
    return threads
