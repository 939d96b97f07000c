"""The replica's client of the process that compiles structures and forks the mask process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from cluster.structured.processes.frames import read_frame, read_message, write_frame
from cluster.structured.processes.messages import (
    COMPILE,
    MAKE_MASKS,
    Compiled,
    CompileLimits,
    CompilerStart,
    Died,
    Rejected,
)
from pagedray.errors import EngineError, ShuttingDownError
from pagedray.machine import child_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.structured.vocabulary import Vocabulary
    from pagedray.structure import Structure

__all__ = ["StructureCompilerClient"]

_COMPILER_MODULE = "cluster.structured.processes.compiler_process"

_START_TIMEOUT_S = 120.0
_DEATH_S = 0.5
_ANSWER_MARGIN_S = 5.0
"""Time for an answer beyond the limit that the process itself keeps."""


class _HungError(EngineError):
    """A process gave no answer, and has been ended."""


class _ShortageError(EngineError):
    """The system has no more files or processes."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"Structures cannot be compiled: {cause.strerror}. Retry later.")


class StructureCompilerClient:
    """Starts the process when it is first needed, and again after it died or did not answer."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], limits: CompileLimits) -> None:
        """`make_vocabulary` is called once, when the process is first started."""
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        # Sockets on which compilations are awaited.
        self._awaited: set[socket.socket] = set()
        self._is_closed = False

    @property
    def process_id(self) -> int | None:
        """The id of the process, if it was started."""
        return None if self._process is None else self._process.pid

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, which is created on first use."""
        with self._lock:
            return len(self._known_vocabulary().tokens)

    def start_process(self) -> None:
        """Start the process unless it runs. Raises EngineError."""
        with self._lock:
            self._running()

    def compile_structure(self, structure: Structure) -> Compiled | Rejected | Died:
        """Return the result for a structure. Raises EngineError."""
        try:
            return self._compiled(structure)
        except _HungError:
            # Such as a process that could start no threads for a while.
            pass
        except _ShortageError:
            raise
        except EngineError:
            if self._is_closed or not self._has_died():
                raise
        # Another structure or an external signal was the cause.
        return self._compiled(structure)

    def _compiled(self, structure: Structure) -> Compiled | Rejected | Died:
        ours, theirs = _connected_sockets()
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
                raise _HungError("The structure compiler process does not respond.") from error
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
                our_end, their_end = _connected_sockets()
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
        with self._lock:
            try:
                socket.send_fds(self._running(), [what], [one.fileno() for one in sockets])
            except OSError as error:
                raise EngineError("The structure compiler process died.") from error
            return self._process

    def _end_hung(self, process: subprocess.Popen[bytes] | None) -> None:
        """End a process unless another process has replaced it; its forks continue."""
        with self._lock:
            if self._process is process:
                self._end()

    def _has_died(self) -> bool:
        with self._lock:
            if self._process is None:
                return True
            try:
                # Its sockets close shortly before it exits.
                self._process.wait(_DEATH_S)
            except subprocess.TimeoutExpired:
                return False
            return True

    def _known_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        return self._vocabulary

    def _running(self) -> socket.socket:
        if self._is_closed:
            raise ShuttingDownError
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._control is None:
            self._control = self._started()
        return self._control

    def _started(self) -> socket.socket:
        ours, theirs = _connected_sockets()
        environment = child_environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _COMPILER_MODULE, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    # xgrammar logs the texts of clients.
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                raise _ShortageError(error) from error
        try:
            ours.settimeout(_START_TIMEOUT_S)
            start = CompilerStart(vocabulary=self._known_vocabulary(), limits=self._limits)
            write_frame(ours, msgspec.msgpack.encode(start))
            # The process is ready.
            read_frame(ours)
        except (OSError, EOFError) as error:
            ours.close()
            self._end()
            raise EngineError("Failed to start the structure compiler process.") from error
        return ours

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
        self._control, self._process = None, None


def _connected_sockets() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        raise _ShortageError(error) from error
