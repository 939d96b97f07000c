"""Makes masks, as a fork of the process that compiles: nothing that it does can harm the replica.

It has two sockets. On one it is asked for the masks of a step, which some threads make: xgrammar
lets go of Python's lock. On the other it is given grammars meanwhile. It ends when either closes.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from cluster.structured.follower import Follower
from cluster.structured.frames import read_frame, write_frame
from cluster.structured.mask_messages import AskMasks, Load, Loaded, LoadFailed, Masks
from pagedray.request import FinishReason

if TYPE_CHECKING:
    import socket

    from cluster.structured.mask_messages import Ask
    from cluster.structured.xgrammar_library import Library

__all__ = ["MAX_STEP_S", "serve_masks"]

MAX_STEP_S = 20.0
"""Time in which the masks of a step must be made; then the kernel ends this process."""
_MAX_THREADS = 8
_FEW = 4
"""Sequences that are not worth the waking of a thread."""


def serve_masks(masks: socket.socket, grammars: socket.socket, library: Library) -> None:
    """Answer until the other end of a socket closes."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    maker = _Maker(library)
    threading.Thread(target=_serve_grammars, args=(grammars, maker), daemon=True).start()
    try:
        while True:
            question = msgspec.msgpack.decode(read_frame(masks), type=AskMasks)
            signal.setitimer(signal.ITIMER_REAL, MAX_STEP_S)
            answer = maker.masks(question)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            write_frame(masks, msgspec.msgpack.encode(answer))
    except (OSError, EOFError):
        return


def _serve_grammars(connection: socket.socket, maker: _Maker) -> None:
    try:
        while True:
            load = msgspec.msgpack.decode(read_frame(connection), type=Load)
            try:
                answer: Loaded | LoadFailed = Loaded(maker.load(load))
            except (RuntimeError, MemoryError) as error:
                answer = LoadFailed(" ".join(str(error).split())[:200])
            write_frame(connection, msgspec.msgpack.encode(answer))
    except (OSError, EOFError):
        # No clean-up of what is the parent's.
        os._exit(0)


class _Maker:
    """The grammars and the sequences that follow them."""

    def __init__(self, library: Library) -> None:
        self._library = library
        # Any: the library's own.
        self._grammars: dict[int, Any] = {}
        self._followers: dict[int, Follower] = {}
        self._num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(self._num_threads)
        self._words = np.zeros((0, library.num_mask_words), dtype=np.int32)

    def load(self, load: Load) -> int:
        """Keep a grammar; return its size in bytes. Raises RuntimeError."""
        self._forget(load.ended_grammar_ids)
        compiled, num_bytes = self._library.load(load.text.decode())
        self._grammars[load.grammar_id] = compiled
        return num_bytes

    def masks(self, question: AskMasks) -> Masks:
        """Return the masks of a step."""
        for sequence_id in question.ended_sequence_ids:
            self._followers.pop(sequence_id, None)
        self._forget(question.ended_grammar_ids)
        num_asks = len(question.asks)
        if num_asks > len(self._words):
            self._words = np.zeros((num_asks, self._library.num_mask_words), dtype=np.int32)
        self._words[:num_asks] = 0
        ends: dict[int, FinishReason] = {}
        complaints: list[str] = []
        # Who is done takes the next: some masks take a hundred times as long as others.
        left = deque(enumerate(question.asks))
        if num_asks > _FEW:
            running = [
                self._threads.submit(self._work_off, left, ends, complaints)
                for _ in range(self._num_threads - 1)
            ]
            self._work_off(left, ends, complaints)
            for one in running:
                one.result()
        else:
            self._work_off(left, ends, complaints)
        return Masks(ends, complaints, self._words[:num_asks].tobytes())

    def _forget(self, grammar_ids: list[int]) -> None:
        for grammar_id in grammar_ids:
            self._grammars.pop(grammar_id, None)

    def _work_off(
        self,
        left: deque[tuple[int, Ask]],
        ends: dict[int, FinishReason],
        complaints: list[str],
    ) -> None:
        while True:
            try:
                row, ask = left.popleft()
            except IndexError:
                return
            follower = self._follower(ask)
            found = follower.write_mask(ask.token_ids, self._words, row)
            if found is not None:
                ends[row] = found
            if found is FinishReason.ERROR:
                complaints.append(follower.complaint)

    def _follower(self, ask: Ask) -> Follower:
        if ask.follow is not None:
            walk = self._library.walk(self._grammars[ask.follow.grammar_id])
            self._followers[ask.sequence_id] = Follower(walk, ask.follow, self._library.vocab_size)
        return self._followers[ask.sequence_id]
