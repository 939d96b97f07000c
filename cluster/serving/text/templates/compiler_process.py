"""The process that compiles templates of requests, so that the server's event loop continues.

It forks for each template, so that the kernel can limit its time and memory.
"""

from __future__ import annotations

import marshal
import os
import resource
import signal
import socket
import sys

import msgspec

from cluster.serving.text.templates.compiler_messages import Compiled, Died, Rejected
from cluster.serving.text.templates.template_code import InvalidTemplateError, compile_template
from cluster.structured.child_process import (
    lift_memory_limit,
    limit_memory,
    read_frame,
    write_frame,
)
from pagedray.machine import lower_priority

__all__ = ["main"]

_NICENESS = 10
_MEMORY_BYTES = 512 * 2**20


def main() -> None:
    """Serve the socket with the descriptor in `sys.argv[1]`, until its other end closes.

    A template may take `sys.argv[2]` seconds of CPU time.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    compile_s = float(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lower_priority(os.getpid(), _NICENESS)
    write_frame(connection, b"")
    while True:
        try:
            source = read_frame(connection).decode()
        except (EOFError, OSError):
            return
        process_id = os.fork()
        if not process_id:
            try:
                _answer(connection, source, compile_s)
            finally:
                # Objects of the parent must not be finalized here.
                os._exit(0)
        _, status = os.waitpid(process_id, 0)
        if os.WIFSIGNALED(status):
            write_frame(connection, msgspec.msgpack.encode(Died(os.WTERMSIG(status))))


def _answer(connection: socket.socket, source: str, compile_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, compile_s)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(_MEMORY_BYTES)
    try:
        found = compile_template(source)
        answer: Compiled | Rejected = Compiled(
            marshal.dumps(found.code), tuple(found.variables), tuple(found.names)
        )
    except InvalidTemplateError as error:
        answer = Rejected(str(error))
    lift_memory_limit()
    body = msgspec.msgpack.encode(answer)
    # A frame is sent as a whole.
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    write_frame(connection, body)


if __name__ == "__main__":
    main()
