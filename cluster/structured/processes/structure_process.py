"""The replica's end of the process that compiles structures and forks the one that makes masks."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from cluster.structured.processes.compiler_process import (
    COMPILE,
    MAKE_MASKS,
    Compiled,
    Died,
    Limits,
    Refused,
    Start,
)
from cluster.structured.processes.frames import read_frame, write_frame
from pagedray.errors import EngineError, ShuttingDownError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.structured.processes.vocabulary import Vocabulary
    from pagedray.request import Structure

__all__ = ["StructureProcess"]

_COMPILER_MODULE = "cluster.structured.processes.compiler_process"

_START_TIMEOUT_S = 120.0
_DEATH_S = 0.5
_ANSWER_SPARE_S = 5.0
"""How long an answer may take beyond what the compilation may."""


class StructureProcess:
    """Starts the process when it is first needed, and another when it has died."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], limits: Limits) -> None:
        """`make_vocabulary` is called once, when the process is first started."""
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    @property
    def process_id(self) -> int | None:
        """The process, if one was started."""
        return None if self._process is None else self._process.pid

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, which is made now unless it was."""
        with self._lock:
            return len(self._known_vocabulary().tokens)

    def start(self) -> None:
        """Start the process unless it runs. Raises EngineError."""
        with self._lock:
            self._running()

    def compile(self, structure: Structure) -> Compiled | Refused | Died:
        """Return what became of a structure. Raises EngineError."""
        try:
            return self._compiled(structure)
        except EngineError:
            if self._is_closed or not self._has_died():
                raise
        # What it died of was another structure, or somebody who ends processes.
        return self._compiled(structure)

    def _compiled(self, structure: Structure) -> Compiled | Refused | Died:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._send(COMPILE, theirs)
            try:
                ours.settimeout(self._limits.wait_s + _ANSWER_SPARE_S)
                write_frame(ours, msgspec.msgpack.encode(structure))
                body = read_frame(ours)
            except (OSError, EOFError) as error:
                if self._is_closed:
                    raise ShuttingDownError from error
                raise EngineError(
                    "The process that compiles structures ended before it had compiled one."
                ) from error
        return msgspec.msgpack.decode(body, type=Compiled | Refused | Died)

    def connect_masks(self) -> tuple[socket.socket, socket.socket]:
        """Start a process that makes masks; return its sockets, for masks and for grammars.

        Raises EngineError.
        """
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            pairs = []
            for _ in range(2):
                our_end, their_end = socket.socketpair()
                pairs.append((ours.enter_context(our_end), theirs.enter_context(their_end)))
            (masks, their_masks), (grammars, their_grammars) = pairs
            self._send(MAKE_MASKS, their_masks, their_grammars)
            # Nobody has them if that raises.
            ours.pop_all()
        return masks, grammars

    def close(self) -> None:
        """End the process. May be called twice."""
        self._is_closed = True
        with self._lock:
            self._end()

    def _send(self, what: bytes, *sockets: socket.socket) -> None:
        with self._lock:
            try:
                socket.send_fds(self._running(), [what], [one.fileno() for one in sockets])
            except OSError as error:
                raise EngineError("The process that compiles structures has ended.") from error

    def _has_died(self) -> bool:
        with self._lock:
            if self._process is None:
                return True
            try:
                # Its sockets close a moment before it is over.
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
                [
                    sys.executable,
                    "-m",
                    _COMPILER_MODULE,
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # xgrammar writes what clients send there.
                stderr=subprocess.DEVNULL,
            )
        try:
            ours.settimeout(_START_TIMEOUT_S)
            start = Start(vocabulary=self._known_vocabulary(), limits=self._limits)
            write_frame(ours, msgspec.msgpack.encode(start))
            # It says when it is ready.
            read_frame(ours)
        except (OSError, EOFError) as error:
            ours.close()
            self._end()
            raise EngineError("The process that compiles structures did not start.") from error
        return ours

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
        self._control, self._process = None, None
