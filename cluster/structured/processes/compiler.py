"""Compiles structures in another process and caches the results, without blocking event loops."""

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
from cluster.structured.processes.compiled_grammar import CompiledGrammar
from cluster.structured.processes.compiler_client import StructureCompilerClient
from cluster.structured.processes.fair_thread_pool import FairThreadPool
from cluster.structured.processes.mask_client import MaskClient
from cluster.structured.processes.messages import CompileLimits, Died, GrammarText, Rejected
from pagedray.errors import EngineError, OverloadedError, ShuttingDownError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.structured.vocabulary import Vocabulary
    from pagedray.structure import Structure

__all__ = ["StructureCompiler"]

logger = logging.getLogger(__name__)

_CACHE_BYTES = 128 * 2**20
"""Above this, the tenant with the largest share loses its least recently used structures."""
_NUM_THREADS = 3
_MAX_RUNNING = 2
"""Compilations of one tenant at a time, so that a thread is left for others."""
_MAX_OPEN = 18
"""Structures of one tenant that wait or are being compiled."""
_MAX_OPEN_TOTAL = 144

_DEFECTS = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
"""Signals by which the library crashes, for example when one of its threads gets no memory."""

_Loaded = tuple[CompiledGrammar, int]
_Key = tuple[str, "Structure | None"]


class StructureCompiler:
    """Compiles the structures of one model. Any thread and any event loop may use it."""

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        *,
        limits: CompileLimits | None = None,
    ) -> None:
        """`make_vocabulary` is called once, for the first structure or at warm-up."""
        self._limits = limits or CompileLimits()
        self._cache_bytes = _CACHE_BYTES
        # By tenant: the time that a structure takes must not reveal structures of others.
        self._cache: OrderedDict[_Key, _Loaded] = OrderedDict()
        self._running: dict[_Key, Future[_Loaded]] = {}
        self._lock = threading.Lock()
        self._threads = FairThreadPool(
            _NUM_THREADS,
            max_running=_MAX_RUNNING,
            max_open=_MAX_OPEN,
            max_open_total=_MAX_OPEN_TOTAL,
            what="structures",
        )
        self._process = StructureCompilerClient(make_vocabulary, self._limits)
        self._client: MaskClient | None = None
        self._client_lock = threading.Lock()
        self._is_closed = False

    @property
    def process_id(self) -> int | None:
        """The id of the compiler process, if it was started."""
        return self._process.process_id

    @property
    def num_cached_bytes(self) -> int:
        """Bytes of all compiled grammars in the cache."""
        with self._lock:
            return sum(size for _, size in self._cache.values())

    def warm_up(self) -> None:
        """Start the compiler process in a thread, so that no client waits for it."""
        with contextlib.suppress(ShuttingDownError):
            self._threads.submit_task("", self._start, size=0)

    async def compile(self, structure: Structure | None, *, tenant: str = "") -> CompiledGrammar:
        """Return a structure's grammar, which is cached for its tenant.

        Without a structure, it allows every token: only reasoning is limited. Raises RequestError,
        or EngineError if the process fails.
        """
        if structure is not None and len(structure.text) > MAX_TEXT_LENGTH:
            raise invalid_structure(
                f"structure has {len(structure.text)} characters; "
                f"at most {MAX_TEXT_LENGTH} are allowed."
            )
        loaded = asyncio.wrap_future(self._submit((tenant, structure)))
        # If the call is cancelled, nothing else looks at the error, which asyncio would log.
        loaded.add_done_callback(lambda done: done.cancelled() or done.exception())
        # A call that is cancelled does not cancel the others that wait for the same structure.
        # Since Python 3.14, asyncio.shield() would log the error of the structure then.
        await asyncio.wait([loaded])
        grammar, _ = loaded.result()
        return grammar

    def stop_accepting(self) -> None:
        """Compile no more structures, and end the waiting calls; others continue."""
        self._threads.close()

    def close(self) -> None:
        """End the process and the calls that wait for it. May be called twice."""
        with self._lock:
            self._is_closed = True
        self.stop_accepting()
        self._process.close()
        with self._client_lock:
            if self._client is not None:
                self._client.close()
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
            tenant, structure = key
            running = self._threads.submit_task(
                tenant,
                lambda: self._compile(tenant, structure),
                size=0 if structure is None else len(structure.text),
            )
            self._running[key] = running
        # Outside of the lock, as the callback runs at once if the task has ended.
        running.add_done_callback(lambda done: self._cache_result(key, done))
        return running

    def _cache_result(self, key: _Key, done: Future[_Loaded]) -> None:
        with self._lock:
            del self._running[key]
            if done.exception() is not None:
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

    def _compile(self, tenant: str, structure: Structure | None) -> _Loaded:
        if structure is None:
            return self._mask_client().load_grammar(GrammarText(b""), tenant=tenant)
        answer = self._process.compile_structure(structure)
        if isinstance(answer, Rejected):
            raise invalid_structure(answer.message)
        if isinstance(answer, Died):
            raise self._error_of(answer)
        grammar, num_bytes = self._mask_client().load_grammar(answer.grammar, tenant=tenant)
        # The text is kept as well, to load it into another mask process.
        return grammar, num_bytes + len(answer.grammar.text)

    def _error_of(self, death: Died) -> Exception:
        match death.signal:
            case signal.SIGPROF:
                return invalid_structure(
                    f"structure cannot be compiled within {self._limits.compile_s:g} s of CPU time "
                    "(--structure-compile-s)."
                )
            case signal.SIGALRM:
                return OverloadedError(
                    f"structure was not compiled within {self._limits.wait_s:g} s; the server is "
                    "busy."
                )
        name = signal.strsignal(death.signal) or f"signal {death.signal}"
        if death.signal in _DEFECTS:
            return invalid_structure(f"structure cannot be compiled: the compiler died ({name}).")
        return EngineError(f"The structure compiler was killed by a signal: {name}.")

    def _mask_client(self) -> MaskClient:
        with self._client_lock:
            if self._client is None:
                num_mask_bytes = -(-self._process.vocab_size // 32) * 4
                self._client = MaskClient(
                    self._process.connect_masks,
                    num_mask_bytes=num_mask_bytes,
                    max_tenant_bytes=self._limits.mask_memory_bytes // 2,
                )
            return self._client

    def _start(self) -> None:
        try:
            self._process.start_process()
        except (EngineError, OSError) as error:
            # The first structure tries again, and reports the error to its client.
            logger.warning("%s", error)
