"""Compiles structures: asks the process that may be killed, and keeps what it made.

The event loop waits for none of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections import Counter, OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING

from cluster.structured.grammar.expressions import invalid_structure
from cluster.structured.grammar.grammar_text import MAX_TEXT_LENGTH
from cluster.structured.processes.compiler_process import Died, Limits, Refused
from cluster.structured.processes.mask_maker import CompiledGrammar, MaskMaker
from cluster.structured.processes.structure_process import StructureProcess
from cluster.structured.processes.tenant_threads import TenantThreads
from pagedray.errors import EngineError, OverloadedError, ShuttingDownError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.structured.processes.vocabulary import Vocabulary
    from pagedray.request import Structure

__all__ = ["StructureCompiler"]

logger = logging.getLogger(__name__)

_CACHE_BYTES = 128 * 2**20
"""When more is kept, the tenant that has most loses what it used longest ago."""
_NUM_THREADS = 3
_MOST_RUNNING = 2
"""Of one tenant; another one always finds a thread."""
_MOST_OPEN = 18
"""Of one tenant."""
_MOST_OPEN_OF_ALL = 144

_DEFECTS = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
"""What the library dies of by itself, also when a thread of its own gets no memory."""

_Loaded = tuple[CompiledGrammar, int]
_Key = tuple[str, "Structure"]


class StructureCompiler:
    """The compiled structures of one model. Any thread and any event loop may use it."""

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        *,
        limits: Limits | None = None,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        """`make_vocabulary` is called once, when the first structure comes or before."""
        self._limits = limits or Limits()
        self._cache_bytes = cache_bytes
        # By tenant: the time that a structure takes must not tell what others have sent.
        self._cache: OrderedDict[_Key, _Loaded] = OrderedDict()
        self._running: dict[_Key, Future[_Loaded]] = {}
        self._lock = threading.Lock()
        self._threads = TenantThreads(
            _NUM_THREADS,
            most_running=_MOST_RUNNING,
            most_open=_MOST_OPEN,
            most_open_of_all=_MOST_OPEN_OF_ALL,
        )
        self._process = StructureProcess(make_vocabulary, self._limits)
        self._maker: MaskMaker | None = None
        self._maker_lock = threading.Lock()
        self._is_closed = False

    @property
    def process_id(self) -> int | None:
        """The process that compiles, if one was started."""
        return self._process.process_id

    @property
    def num_cached_bytes(self) -> int:
        """Bytes of the grammars that are kept."""
        with self._lock:
            return sum(size for _, size in self._cache.values())

    def warm_up(self) -> None:
        """Start the process that compiles, in a thread, so that no client waits for it."""
        with contextlib.suppress(ShuttingDownError):
            self._threads.submit("", self._start)

    async def compile(self, structure: Structure, *, tenant: str = "") -> CompiledGrammar:
        """Return a structure's grammar, which is kept for its tenant.

        Raises RequestError, or EngineError if there is none.
        """
        if len(structure.text) > MAX_TEXT_LENGTH:
            raise invalid_structure(
                f"structure has {len(structure.text)} characters; "
                f"at most {MAX_TEXT_LENGTH} are allowed."
            )
        # One who gives up leaves the work to the others who wait for it.
        grammar, _ = await asyncio.shield(asyncio.wrap_future(self._submit((tenant, structure))))
        return grammar

    def close(self) -> None:
        """End the process and what waits for it. May be called twice."""
        with self._lock:
            self._is_closed = True
        self._threads.close()
        self._process.close()
        with self._maker_lock:
            if self._maker is not None:
                self._maker.close()
        self._threads.join()

    def _submit(self, key: _Key) -> Future[_Loaded]:
        with self._lock:
            if self._is_closed:
                raise ShuttingDownError
            if key in self._cache:
                self._cache.move_to_end(key)
                ready: Future[_Loaded] = Future()
                ready.set_result(self._cache[key])
                return ready
            if key in self._running:
                return self._running[key]
            running = self._threads.submit(key[0], lambda: self._compile(*key))
            self._running[key] = running
        # Outside of the lock: what has ended already calls at once.
        running.add_done_callback(lambda done: self._keep(key, done))
        return running

    def _keep(self, key: _Key, done: Future[_Loaded]) -> None:
        with self._lock:
            del self._running[key]
            if done.cancelled() or done.exception() is not None:
                return
            self._cache[key] = done.result()
            self._make_room()

    def _make_room(self) -> None:
        sizes: Counter[str] = Counter()
        for (tenant, _), (_, size) in self._cache.items():
            sizes[tenant] += size
        while sizes.total() > self._cache_bytes:
            tenant = max(sizes, key=sizes.__getitem__)
            oldest = next(key for key in self._cache if key[0] == tenant)
            _, size = self._cache.pop(oldest)
            sizes[tenant] -= size

    def _compile(self, tenant: str, structure: Structure) -> _Loaded:
        answer = self._process.compile(structure)
        if isinstance(answer, Refused):
            raise invalid_structure(answer.message)
        if isinstance(answer, Died):
            raise self._refusal_of(answer)
        grammar, num_bytes = self._masks().grammar(answer.text, tenant=tenant)
        # The text is kept as well, for another process that makes masks.
        return grammar, num_bytes + len(answer.text)

    def _refusal_of(self, death: Died) -> Exception:
        match death.signal:
            case signal.SIGPROF:
                return invalid_structure(
                    f"structure takes more than {self._limits.compile_s:g} s of CPU time to "
                    "compile."
                )
            case signal.SIGALRM:
                return OverloadedError(
                    f"structure was not compiled within {self._limits.wait_s:g} s; the server is "
                    "busy."
                )
        name = signal.strsignal(death.signal) or f"signal {death.signal}"
        if death.signal in _DEFECTS:
            return invalid_structure(f"structure cannot be compiled: the compiler died ({name}).")
        return EngineError(f"The process that compiled the structure was ended: {name}.")

    def _masks(self) -> MaskMaker:
        with self._maker_lock:
            if self._maker is None:
                num_mask_bytes = -(-self._process.vocab_size // 32) * 4
                self._maker = MaskMaker(
                    self._process.connect_masks,
                    num_mask_bytes=num_mask_bytes,
                    most_tenant_bytes=self._limits.mask_memory_bytes // 2,
                )
            return self._maker

    def _start(self) -> None:
        try:
            self._process.start()
        except (EngineError, OSError) as error:
            # The first structure tries again, and its client is told.
            logger.warning("%s", error)
