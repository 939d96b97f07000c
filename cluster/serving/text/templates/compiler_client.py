"""The server's client of the process that compiles templates of requests."""

from __future__ import annotations

import contextlib
import marshal
import signal
import socket
import subprocess
import sys
import threading

from cluster.serving.text.templates.compiler_messages import Compiled, Died, Rejected
from cluster.serving.text.templates.template_code import InvalidTemplateError, TemplateCode
from cluster.structured.child_process import read_frame, read_message, write_frame
from pagedray.errors import EngineError, OverloadedError, ShuttingDownError
from pagedray.machine import child_environment

__all__ = ["TemplateCompilerClient"]

_COMPILER_MODULE = "cluster.serving.text.templates.compiler_process"

_START_TIMEOUT_S = 120.0
_COMPILE_S = 5.0
_WAIT_S = 25.0
"""Longer than the CPU time, since the machine may be busy."""


class TemplateCompilerClient:
    """Starts the process when it is first needed, and again after it has died. Thread-safe."""

    def __init__(self, *, compile_s: float = _COMPILE_S, wait_s: float = _WAIT_S) -> None:
        """A template may take `compile_s` of CPU time, and `wait_s` in all."""
        self._compile_s = compile_s
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._is_closed = False

    @property
    def process_id(self) -> int | None:
        """The id of the process, if it was started."""
        return None if self._process is None else self._process.pid

    def start_process(self) -> None:
        """Start the process unless it is running. Raises EngineError."""
        with self._lock:
            self._running()

    def compile_template(self, source: str) -> TemplateCode:
        """Return the code of a template; other threads wait until it is compiled.

        Raises InvalidTemplateError, OverloadedError or EngineError.
        """
        with self._lock:
            connection = self._running()
            try:
                connection.settimeout(self._wait_s)
                write_frame(connection, source.encode())
                found: Compiled | Rejected | Died = read_message(
                    connection, Compiled | Rejected | Died
                )
            except TimeoutError as error:
                self._end()
                raise OverloadedError(
                    "chat_template could not be compiled in time; the server is busy."
                ) from error
            except (OSError, EOFError) as error:
                self._end()
                if self._is_closed:
                    raise ShuttingDownError from error
                raise EngineError("The chat template compiler process died.") from error
        match found:
            case Compiled(code, variables, names):
                return TemplateCode(marshal.loads(code), frozenset(variables), frozenset(names))
            case Rejected(reason):
                raise InvalidTemplateError(reason)
            case Died(number):
                raise self._error_of(number)

    def close(self) -> None:
        """End the process and the calls that wait for it. May be called twice."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _error_of(self, number: int) -> Exception:
        match number:
            case signal.SIGPROF:
                return InvalidTemplateError(
                    f"it takes more than {self._compile_s:g} s of CPU time to compile"
                )
            case signal.SIGKILL | signal.SIGTERM:
                return EngineError("The chat template compiler process was killed.")
        return InvalidTemplateError("Python cannot compile it")

    def _running(self) -> socket.socket:
        if self._is_closed:
            raise ShuttingDownError
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._connection is None:
            self._connection = self._started()
        return self._connection

    def _started(self) -> socket.socket:
        try:
            ours = self._begun()
        except OSError as error:
            # Such as too many open files.
            raise EngineError(
                f"Chat templates cannot be compiled: {error.strerror}. Retry later."
            ) from error
        try:
            ours.settimeout(_START_TIMEOUT_S)
            # The process is ready.
            read_frame(ours)
        except (OSError, EOFError) as error:
            ours.close()
            self._end()
            raise EngineError(
                "Failed to start the process that compiles chat templates."
            ) from error
        return ours

    def _begun(self) -> socket.socket:
        """Start the process, and return the connection to it; raises OSError."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as kept, theirs:
            kept.enter_context(ours)
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    _COMPILER_MODULE,
                    str(theirs.fileno()),
                    f"{self._compile_s}",
                ],
                pass_fds=[theirs.fileno()],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Errors of Python's compiler quote the template.
                stderr=subprocess.DEVNULL,
            )
            kept.pop_all()
        return ours

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
        self._connection, self._process = None, None
