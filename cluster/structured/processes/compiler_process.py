"""The process that compiles grammars, and may be killed over any of them.

It imports xgrammar and learns the vocabulary once, and then forks: for each structure, and once for
the masks of all. The fork of a structure has a limit of time and of memory, kept by the kernel, and
what it does cannot harm the next one. A structure comes with a socket of its own; behind the fork
that compiles stands another, which tells on it how that one died. Nothing that arrives is
unpickled.
"""

from __future__ import annotations

import os
import random
import resource
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from cluster.structured.grammar.grammar_text import grammar_text
from cluster.structured.processes.frames import read_frame, write_frame
from cluster.structured.processes.mask_process import serve_masks
from cluster.structured.processes.memory_limit import (
    is_out_of_memory,
    lift_memory_limit,
    limit_memory,
)
from cluster.structured.processes.vocabulary import Vocabulary
from cluster.structured.processes.warm_up import NICENESS, IdleLearning
from pagedray.errors import InvalidRequestError
from pagedray.request import Structure

if TYPE_CHECKING:
    from cluster.structured.processes.xgrammar_library import Library

__all__ = [
    "COMPILE",
    "MAKE_MASKS",
    "Compiled",
    "Died",
    "Limits",
    "Refused",
    "Start",
    "limits_of",
    "main",
]

COMPILE = b"c"
"""Comes with the socket of a structure."""
MAKE_MASKS = b"m"
"""Comes with the sockets for masks and for grammars."""
_TRIAL_S = 0.1
_NUM_TRIAL_TOKENS = 64


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one compilation may take."""

    compile_s: float = 10.0
    """CPU time, of which a busy machine takes no more than an idle one."""
    wait_s: float = 50.0
    """Time for all of it, on a machine that is busy with other things."""
    memory_bytes: int = 512 * 2**20
    answer_bytes: int = 32 * 2**20
    mask_memory_bytes: int = 2**30
    """For the grammars in use, for all sequences that follow them, and for those that are kept."""
    mask_s: float = 0.1
    """CPU time in which a token is taken and the mask after it is made, when that is tried."""


def limits_of(compile_s: float) -> Limits:
    """Return the limits that go with so much CPU time for a compilation."""
    return Limits(compile_s=compile_s, wait_s=5 * compile_s, mask_s=compile_s / 100)


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is told first."""

    vocabulary: Vocabulary
    limits: Limits


class Compiled(msgspec.Struct, frozen=True, tag="compiled"):
    """A compiled grammar, as xgrammar writes it in JSON."""

    text: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Why a structure was not compiled, in words for its client."""

    message: str


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The fork that compiled was ended by a signal."""

    signal: int


def main() -> None:
    """Serve the socket whose descriptor is the program's argument, until its other end closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    # Forks are nobody's to wait for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = msgspec.msgpack.decode(read_frame(control), type=Start)
    # Nobody else may import it.
    from cluster.structured.processes.xgrammar_library import Library

    library = Library(start.vocabulary)
    write_frame(control, b"")
    learning = IdleLearning(library)
    while True:
        while not learning.is_over and not select.select([control], [], [], 0.0)[0]:
            learning.step()
        what, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not descriptors:
            return
        connections = [socket.socket(fileno=one) for one in descriptors]
        if not os.fork():
            control.close()
            try:
                if what == MAKE_MASKS:
                    masks, grammars = connections
                    serve_masks(
                        masks, grammars, library, memory_bytes=start.limits.mask_memory_bytes
                    )
                else:
                    (connection,) = connections
                    _stand_behind(connection, library, start.limits)
            finally:
                # No clean-up of what is the parent's.
                os._exit(0)
        for one in connections:
            one.close()


def _stand_behind(connection: socket.socket, library: Library, limits: Limits) -> None:
    """Have a fork answer, and answer in its place if a signal ends it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process_id = os.fork()
    if not process_id:
        _answer(connection, library, limits)
        os._exit(0)
    _, status = os.waitpid(process_id, 0)
    if os.WIFSIGNALED(status):
        connection.settimeout(5.0)
        write_frame(connection, msgspec.msgpack.encode(Died(os.WTERMSIG(status))))


def _answer(connection: socket.socket, library: Library, limits: Limits) -> None:
    structure = msgspec.msgpack.decode(read_frame(connection), type=Structure)
    # Masks and ranks come first: whole batches wait for those.
    os.nice(NICENESS)
    _limit(limits)
    try:
        text = library.compile(grammar_text(structure))
        _try_out(library, text, limits)
    except InvalidRequestError as error:
        answer: Compiled | Refused = Refused(str(error))
    except UnicodeDecodeError as error:
        # The library cuts a character in two where it quotes what it does not expect.
        message = bytes(error.object).decode(errors="replace")
        answer = Refused(f"structure cannot be compiled: {_in_short(message)}.")
    # Whatever the library raises, the client is told.
    except Exception as error:
        lift_memory_limit()
        if is_out_of_memory(error):
            what = f"takes more than {limits.memory_bytes >> 20} MiB to compile"
        else:
            what = f"cannot be compiled: {_in_short(str(error) or type(error).__name__)}"
        answer = Refused(f"structure {what}.")
    else:
        lift_memory_limit()
        answer = Compiled(text.encode())
    body = msgspec.msgpack.encode(answer)
    if len(body) > limits.answer_bytes:
        body = msgspec.msgpack.encode(Refused("structure has a grammar that is too large."))
    # The rest depends on the reader.
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    connection.settimeout(5.0)
    write_frame(connection, body)


def _limit(limits: Limits) -> None:
    """Have the kernel end this process when it takes too much."""
    # Not handled by Python, which a library that computes would keep waiting.
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.compile_s)
    signal.setitimer(signal.ITIMER_REAL, limits.wait_s)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(limits.memory_bytes)


def _try_out(library: Library, text: str, limits: Limits) -> None:
    """Follow the grammar for some random tokens; raise InvalidRequestError if that goes badly."""
    compiled, _ = library.load(text)
    walk = library.walk(compiled)
    generator = random.Random(0)
    until_s = time.thread_time() + _TRIAL_S
    for index in range(_NUM_TRIAL_TOKENS):
        started_s = time.thread_time()
        allowed = walk.allowed_ids(library.vocab_size)
        if not len(allowed):
            if index == 0 and not walk.is_complete:
                raise InvalidRequestError(
                    "structure allows no text that the model's tokens can write.",
                    param="structure",
                )
            return
        walk.take(int(allowed[generator.randrange(len(allowed))]))
        if time.thread_time() - started_s > limits.mask_s:
            raise InvalidRequestError(
                "structure is too ambiguous: to follow it takes too long.", param="structure"
            )
        if walk.has_ended or time.thread_time() > until_s:
            return


def _in_short(message: str) -> str:
    # Behind the place in the library's sources.
    line = " ".join(message.split())
    return line.rpartition(".cc:")[2].partition(": ")[2][:200].rstrip(".") or line[:200].rstrip(".")


if __name__ == "__main__":
    main()
