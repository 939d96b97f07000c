"""Compiles structures: asks the process that may be killed, and keeps what it made.

Nothing is started before the first structure, and the event loop waits for none of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from cluster.structured.compiler_process import Compiled, Limits, Refused, Start
from cluster.structured.expressions import refuse
from cluster.structured.frames import read_frame, write_frame
from cluster.structured.grammar import CompiledGrammar
from cluster.structured.grammar_text import MAX_TEXT_LENGTH
from pagedray.errors import EngineError, OverloadedError, ShuttingDownError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.structured.vocabulary import Vocabulary
    from cluster.structured.xgrammar_library import Library
    from pagedray.request import Structure

__all__ = ["StructureCompiler"]

_CACHE_BYTES = 128 * 2**20
_NUM_THREADS = 2
_MOST_WAITING = 16
_START_TIMEOUT_S = 120.0
_ANSWER_SPARE_S = 5.0
"""How long an answer may take beyond what the compilation may."""

_Loaded = tuple[CompiledGrammar, int]


class StructureCompiler:
    """The compiled structures of one model. Any thread and any event loop may use it."""

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        *,
        limits: Limits | None = None,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        """`make_vocabulary` is called once, when the first structure comes."""
        self._make_vocabulary = make_vocabulary
        self._limits = limits or Limits()
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[Structure, _Loaded] = OrderedDict()
        self._running: dict[Structure, Future[_Loaded]] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="pagedray-grammars")
        self._start_lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._library: Library | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    @property
    def process_id(self) -> int | None:
        """The process that compiles, if one was started."""
        return None if self._process is None else self._process.pid

    @property
    def num_cached_bytes(self) -> int:
        """Bytes of the grammars that are kept."""
        with self._lock:
            return sum(size for _, size in self._cache.values())

    async def compile(self, structure: Structure) -> CompiledGrammar:
        """Return a structure's grammar. Raises RequestError, or EngineError if there is none."""
        if len(structure.text) > MAX_TEXT_LENGTH:
            raise refuse(
                f"structure has {len(structure.text)} characters; "
                f"at most {MAX_TEXT_LENGTH} are allowed."
            )
        # One who gives up leaves the work to the others who wait for it.
        grammar, _ = await asyncio.shield(asyncio.wrap_future(self._submit(structure)))
        return grammar

    def close(self) -> None:
        """End the process and what waits for it. May be called twice."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._start_lock:
            self._end_process()
        self._threads.shutdown()

    def _submit(self, structure: Structure) -> Future[_Loaded]:
        with self._lock:
            if self._is_closed:
                raise ShuttingDownError
            if structure in self._cache:
                self._cache.move_to_end(structure)
                ready: Future[_Loaded] = Future()
                ready.set_result(self._cache[structure])
                return ready
            if structure in self._running:
                return self._running[structure]
            if len(self._running) >= _NUM_THREADS + _MOST_WAITING:
                raise OverloadedError(
                    f"{len(self._running)} structures are being compiled, which is all that may be."
                )
            running = self._threads.submit(self._compile, structure)
            self._running[structure] = running
        # Outside of the lock: what has ended already calls at once.
        running.add_done_callback(lambda done: self._keep(structure, done))
        return running

    def _keep(self, structure: Structure, done: Future[_Loaded]) -> None:
        with self._lock:
            del self._running[structure]
            if done.cancelled() or done.exception() is not None:
                return
            self._cache[structure] = done.result()
            num_bytes = sum(size for _, size in self._cache.values())
            while num_bytes > self._cache_bytes:
                _, (_, size) = self._cache.popitem(last=False)
                num_bytes -= size

    def _compile(self, structure: Structure) -> _Loaded:
        library, vocabulary, control = self._started()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                socket.send_fds(control, [b"s"], [theirs.fileno()])
                theirs.close()
                ours.settimeout(self._limits.wait_s + _ANSWER_SPARE_S)
                write_frame(ours, msgspec.msgpack.encode(structure))
                body = read_frame(ours)
            except (OSError, EOFError) as error:
                raise self._failure(error) from error
        answer = msgspec.msgpack.decode(body, type=Compiled | Refused)
        if isinstance(answer, Refused):
            raise refuse(answer.message)
        compiled, size = library.load(answer.text)
        # What is sent is about what is kept.
        size = max(size, len(answer.text))
        grammar = CompiledGrammar(library, compiled, vocab_size=len(vocabulary.tokens))
        return grammar, size

    def _failure(self, error: Exception) -> Exception:
        with self._start_lock:
            if self._is_closed:
                return ShuttingDownError()
            if self._process is not None and self._process.poll() is not None:
                # The next structure starts another.
                self._end_process()
                return EngineError("The process that compiles structures has ended; try again.")
        if isinstance(error, EOFError | ConnectionError):
            return refuse(
                f"structure takes more than {self._limits.compile_s:g} s of CPU time or "
                f"{self._limits.memory_bytes >> 20} MiB to compile."
            )
        return EngineError(f"The process that compiles structures does not answer: {error}.")

    def _started(self) -> tuple[Library, Vocabulary, socket.socket]:
        with self._start_lock:
            if self._is_closed:
                raise ShuttingDownError
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            if self._control is None:
                self._start_process(self._vocabulary)
            assert self._library is not None
            assert self._control is not None
            return self._library, self._vocabulary, self._control

    def _start_process(self, vocabulary: Vocabulary) -> None:
        ours, theirs = socket.socketpair()
        # Found where this process finds it, which an installation need not tell.
        environment = dict(
            os.environ,
            PYTHONPATH=os.pathsep.join(path for path in sys.path if path),
            CUDA_VISIBLE_DEVICES="",
            OMP_NUM_THREADS="1",
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cluster.structured.compiler_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # xgrammar writes what clients send there.
                stderr=subprocess.DEVNULL,
            )
        try:
            ours.settimeout(_START_TIMEOUT_S)
            start = Start(vocabulary=vocabulary, limits=self._limits)
            write_frame(ours, msgspec.msgpack.encode(start))
            # Both import at the same time.
            self._load_library(vocabulary)
            # It says when it is ready.
            read_frame(ours)
        except (OSError, EOFError) as error:
            ours.close()
            self._end_process()
            raise EngineError("The process that compiles structures did not start.") from error
        self._control = ours

    def _load_library(self, vocabulary: Vocabulary) -> None:
        if self._library is None:
            # It takes seconds to import, and one that serves no structure never needs it.
            from cluster.structured.xgrammar_library import Library

            self._library = Library(vocabulary)

    def _end_process(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
        self._control, self._process = None, None
