"""Compiles structures in another process and caches the results, without blocking event loops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections import Counter, OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec

from cluster.structured.child_process import ChildProcess, read_message, write_frame
from cluster.structured.fair_thread_pool import FairThreadPool
from cluster.structured.grammar.expressions import invalid_structure
from cluster.structured.grammar.grammar_text import MAX_TEXT_LENGTH
from cluster.structured.mask_client import CompiledGrammar, MaskClient
from cluster.structured.messages import (
    COMPILE,
    MAKE_MASKS,
    Compiled,
    CompileLimits,
    CompilerStart,
    Died,
    GrammarText,
    Rejected,
)
from pagedray.errors import EngineError, OverloadedError, ShuttingDownError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

    from cluster.structured.token_matchers import Vocabulary
    from pagedray.sampling_params import Structure

__all__ = ["StructureCompiler", "StructureCompilerClient"]

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

_COMPILER_MODULE = "cluster.structured.compiler_process"
_ANSWER_MARGIN_S = 5.0
"""Time for an answer beyond the limit that the process itself keeps."""


class StructureCompiler:
    """Compiles the structures of one model. Any thread and any event loop may use it."""

    def __init__(
        self, make_vocabulary: Callable[[], Vocabulary], *, limits: CompileLimits | None = None
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

    def warm_up(self) -> None:
        """Start the compiler process in a thread, so that no client waits for it."""
        with contextlib.suppress(ShuttingDownError):
            self._threads.submit_task("", self._process.warm_up)

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
            running = self._threads.submit_task(tenant, lambda: self._compile(tenant, structure))
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


class StructureCompilerClient(ChildProcess):
    """Starts the process when it is first needed, and again after it died or did not answer."""

    work = "structures"

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], limits: CompileLimits) -> None:
        """`make_vocabulary` is called once, when the process is first started."""
        super().__init__()
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._limits = limits
        # Sockets on which compilations are awaited.
        self._awaited: set[socket.socket] = set()

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, which is created on first use."""
        with self._lock:
            return len(self._known_vocabulary().tokens)

    def compile_structure(self, structure: Structure) -> Compiled | Rejected | Died:
        """Return the result for a structure. Raises EngineError."""
        try:
            return self._compiled(structure)
        except EngineError:
            if self._is_closed:
                raise
        # Another structure or an external signal was the cause.
        return self._compiled(structure)

    def _compiled(self, structure: Structure) -> Compiled | Rejected | Died:
        ours, theirs = self._connected_sockets()
        with ours, self._awaiting(ours):
            with theirs:
                process = self._send(COMPILE, theirs)
            try:
                ours.settimeout(self._limits.wait_s + _ANSWER_MARGIN_S)
                write_frame(ours, msgspec.msgpack.encode(structure))
                found: Compiled | Rejected | Died = read_message(ours, Compiled | Rejected | Died)
            except TimeoutError as error:
                # It does not even report that a limit is exceeded.
                self._end_hung(process)
                raise EngineError("The structure compiler process does not respond.") from error
            except (OSError, EOFError) as error:
                if self._is_closed:
                    raise ShuttingDownError from error
                raise EngineError("The structure compiler process died.") from error
        return found

    def connect_masks(self) -> tuple[socket.socket, socket.socket]:
        """Start a mask process; return its sockets for masks and for grammars.

        Raises EngineError.
        """
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            pairs = []
            for _ in range(2):
                our_end, their_end = self._connected_sockets()
                pairs.append((ours.enter_context(our_end), theirs.enter_context(their_end)))
            (masks, their_masks), (grammars, their_grammars) = pairs
            self._send(MAKE_MASKS, their_masks, their_grammars)
            # Otherwise ours are closed, too.
            ours.pop_all()
        return masks, grammars

    def close(self) -> None:
        """End the process, and the wait for compilations. May be called twice."""
        self._is_closed = True
        with self._lock:
            self._end()
            for one in self._awaited:
                # The process has forked, and its forks keep the other ends open.
                one.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _awaiting(self, connection: socket.socket) -> Iterator[None]:
        """Let `close` end the wait for a connection."""
        with self._lock:
            self._awaited.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._awaited.remove(connection)

    def _send(self, what: bytes, *sockets: socket.socket) -> subprocess.Popen[bytes] | None:
        """Return the process that gets the message."""
        descriptors = [one.fileno() for one in sockets]
        with self._lock:
            for _ in range(2):
                try:
                    socket.send_fds(self._running(), [what], descriptors)
                except OSError:
                    # The sockets of the process close shortly before it exits.
                    self._end()
                else:
                    return self._process
        raise EngineError("The structure compiler process died.")

    def _end_hung(self, process: subprocess.Popen[bytes] | None) -> None:
        """End a process unless another process has replaced it; its forks continue."""
        with self._lock:
            if self._process is process:
                self._end()

    def _known_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        return self._vocabulary

    def _command(self, descriptor: int) -> list[str]:
        return ["-m", _COMPILER_MODULE, str(descriptor)]

    def _prepare(self, connection: socket.socket) -> None:
        start = CompilerStart(vocabulary=self._known_vocabulary(), limits=self._limits)
        write_frame(connection, msgspec.msgpack.encode(start))
