"""The chat templates of requests, rendered in another process, and of the operator's program.

The process forks for each rendering, so that the kernel limits its time and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import pickle
import resource
import signal
import socket
import sys
from typing import TYPE_CHECKING, TypeVar

import msgspec

from cluster.serving.text.chat_template import ChatTemplate, InvalidTemplateError
from cluster.structured.child_process import (
    ChildProcess,
    lift_memory_limit,
    limit_memory,
    read_frame,
    read_message,
    write_frame,
)
from cluster.structured.fair_thread_pool import FairThreadPool
from pagedray.errors import (
    EngineError,
    InvalidRequestError,
    OverloadedError,
    ShuttingDownError,
    invalid_field,
)
from pagedray.machine import lower_priority

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cluster.serving.text.template_arguments import ChatPrompt

__all__ = ["ProgramTemplates", "RequestTemplates", "TemplateProcess"]

logger = logging.getLogger(__name__)

_PARAM = "chat_template"
_MAX_LENGTH = 2**15
"""Characters of a template: templates of models have up to 20 000."""
_MAX_TEXT = 2**24
"""Characters of a prompt."""
_MAX_OPEN = 16
"""Maximum number of open renderings of one tenant."""
_MAX_OPEN_TOTAL = 64
_CPU_S = 2.0
"""CPU time of compiling and rendering a template."""
_WAIT_S = 20.0
"""Longer than the CPU time, since the machine may be busy."""
_NICENESS = 10
_MEMORY_BYTES = 512 * 2**20
Result = TypeVar("Result")
_PROGRAM = f"from {__name__} import serve_templates; serve_templates()"


class _Rendered(msgspec.Struct, frozen=True, tag="rendered"):
    """A prompt."""

    text: bytes
    """UTF-8, with lone surrogates, which the server rejects."""


class _Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The template is invalid, or rejects the messages."""

    reason: str
    param: str | None


class _Died(msgspec.Struct, frozen=True, tag="died"):
    """The fork was killed by a signal."""

    signal: int


class RequestTemplates:
    """Renders conversations with templates of requests, tenants in turn.

    Used from one event loop, which waits for no rendering.
    """

    def __init__(
        self, special_tokens: Mapping[str, str], *, process: TemplateProcess | None = None
    ) -> None:
        self._special_tokens = special_tokens
        self._process = TemplateProcess() if process is None else process
        # While a thread uses the process, the other thread may be assigned to another tenant.
        self._threads = FairThreadPool(
            2,
            max_running=1,
            max_open=_MAX_OPEN,
            max_open_total=_MAX_OPEN_TOTAL,
            what="chat templates",
        )

    def warm_up(self) -> None:
        """Start the process in a thread, so that no client waits for it."""
        with contextlib.suppress(ShuttingDownError):
            self._threads.submit_task("", self._process.warm_up)

    async def run(
        self, source: str, tenant: str, render: Callable[[Callable[[ChatPrompt], str]], Result]
    ) -> Result:
        """Return the result of `render`, which is called with the rendering by a source.

        Raises RequestError, or EngineError if the process fails.
        """
        if len(source) > _MAX_LENGTH:
            raise invalid_field(
                _PARAM, f"may have at most {_MAX_LENGTH} characters, not {len(source)}."
            )
        by_source = functools.partial(self._process.render, source, self._special_tokens)
        task = functools.partial(render, by_source)
        return await asyncio.wrap_future(self._threads.submit_task(tenant, task))

    def stop_accepting(self) -> None:
        """Render nothing more, and end the calls that wait for a rendering."""
        self._threads.close()

    def close(self) -> None:
        """End the process and the calls that wait for it. May be called twice."""
        self.stop_accepting()
        self._process.close()
        self._threads.join()


class TemplateProcess(ChildProcess):
    """Renders conversations in a process of its own."""

    work = "chat templates"

    def __init__(self, *, cpu_s: float = _CPU_S, wait_s: float = _WAIT_S) -> None:
        """A rendering may take `cpu_s` of CPU time, and `wait_s` in all."""
        super().__init__()
        self._cpu_s = cpu_s
        self._wait_s = wait_s

    def render(self, source: str, special_tokens: Mapping[str, str], prompt: ChatPrompt) -> str:
        """Return a conversation in a template; other threads wait until it is rendered.

        Raises InvalidRequestError, OverloadedError or EngineError.
        """
        body = pickle.dumps((source, special_tokens, prompt))
        with self._lock:
            connection = self._running()
            try:
                connection.settimeout(self._wait_s)
                write_frame(connection, body)
                found: _Rendered | _Rejected | _Died = read_message(
                    connection, _Rendered | _Rejected | _Died
                )
            except TimeoutError as error:
                self._end()
                raise OverloadedError(
                    "chat_template could not be rendered in time; the server is busy."
                ) from error
            except (OSError, EOFError) as error:
                self._end()
                if self._is_closed:
                    raise ShuttingDownError from error
                raise EngineError("The chat template process died.") from error
        match found:
            case _Rendered(text):
                return text.decode(errors="surrogatepass")
            case _Rejected(reason, param):
                raise InvalidRequestError(reason, param=param)
            case _Died(signal.SIGKILL | signal.SIGTERM):
                raise EngineError("The chat template process was killed.")
            case _Died(signal.SIGPROF):
                reason = f"takes more than {self._cpu_s:g} s of CPU time"
            # Such as the overflow of a stack.
            case _:
                reason = "cannot be compiled by Python"
        raise InvalidRequestError(f"The request's chat template {reason}.", param=_PARAM)

    def close(self) -> None:
        """End the process and the calls that wait for it. May be called twice."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _command(self, descriptor: int) -> list[str]:
        return ["-c", _PROGRAM, str(descriptor), f"{self._cpu_s}"]


def serve_templates() -> None:
    """Serve the socket with the descriptor in `sys.argv[1]`, until its other end closes.

    A rendering may take `sys.argv[2]` seconds of CPU time.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    cpu_s = float(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lower_priority(os.getpid(), _NICENESS)
    write_frame(connection, b"")
    while True:
        try:
            body = read_frame(connection)
        except (EOFError, OSError):
            return
        process_id = os.fork()
        if not process_id:
            try:
                _answer(connection, body, cpu_s)
            finally:
                # Objects of the parent must not be finalized here.
                os._exit(0)
        _, status = os.waitpid(process_id, 0)
        if os.WIFSIGNALED(status):
            write_frame(connection, msgspec.msgpack.encode(_Died(os.WTERMSIG(status))))


def _answer(connection: socket.socket, body: bytearray, cpu_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(_MEMORY_BYTES)
    answer: _Rendered | _Rejected
    try:
        text = _rendered(*pickle.loads(body))
        answer = _Rendered(text.encode(errors="surrogatepass"))
    except InvalidRequestError as error:
        answer = _Rejected(str(error), error.param)
    lift_memory_limit()
    encoded = msgspec.msgpack.encode(answer)
    # A frame is sent as a whole.
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    write_frame(connection, encoded)


def _rendered(source: str, special_tokens: Mapping[str, str], prompt: ChatPrompt) -> str:
    """Return a conversation in a template. Raises InvalidRequestError."""
    text = _template(source, special_tokens).render(prompt)
    if len(text) > _MAX_TEXT:
        raise InvalidRequestError(
            f"The request's chat template writes {len(text)} characters; at most {_MAX_TEXT} are "
            "allowed.",
            param="messages",
        )
    return text


class ProgramTemplates:
    """Compiles templates of the program that runs the engine, and keeps the last template."""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = special_tokens
        self._last: ChatTemplate | None = None

    def template_of(self, source: str) -> ChatTemplate:
        """Return the template of a source. Raises InvalidRequestError."""
        if self._last is None or self._last.source != source:
            self._last = _template(source, self._special_tokens)
        return self._last


def _template(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """Return the template of a source. Raises InvalidRequestError."""
    try:
        return ChatTemplate(source, special_tokens, origin="The request", owner="request")
    except InvalidTemplateError as error:
        raise InvalidRequestError(str(error), param=_PARAM) from error
