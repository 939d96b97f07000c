"""The process that compiles structures, isolated from the replica.

The process imports xgrammar and receives the vocabulary once, and then forks: for each structure,
and once for the masks of all. The kernel limits the time and memory of a structure's fork, and the
death of a fork affects no other structure. Each structure comes with its own socket, on which this
process reports if a signal kills the fork. Nothing received is unpickled.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cluster.structured.child_process import (
    is_out_of_memory,
    lift_memory_limit,
    limit_memory,
    read_message,
    write_frame,
)
from cluster.structured.grammar.expressions import write_ebnf
from cluster.structured.grammar.grammar_text import grammar_text
from cluster.structured.grammar.schema_strings import limited_string
from cluster.structured.mask_process import serve_masks
from cluster.structured.messages import (
    MAKE_MASKS,
    Compiled,
    CompileLimits,
    CompilerStart,
    Died,
    GrammarText,
    Rejected,
)
from pagedray.errors import InvalidRequestError, invalid_field
from pagedray.machine import lower_priority
from pagedray.sampling_params import Structure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.structured.grammar.expressions import Expression
    from cluster.structured.xgrammar_library import XGrammarLibrary

__all__ = ["main"]

_TRIAL_S = 0.1
_NUM_TRIAL_TOKENS = 64
_SMALLER = "use fewer optional properties, choices or tools"

_LENGTHS = (*((0, most) for most in range(2, 65, 2)), (0, 128), (32, 256))
"""Limits of strings with rules that all strings share."""
NICENESS = 10
"""Priority of compilations, below that of masks and ranks."""


def main() -> None:
    """Serve the socket with the descriptor in `sys.argv[1]`, until its other end closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = read_message(control, CompilerStart)
    # Imported here, as the replica imports this module's package but not xgrammar.
    from cluster.structured.xgrammar_library import XGrammarLibrary

    library = XGrammarLibrary(start.vocabulary)
    # A collection in a fork would write to, and so copy, the memory of all objects.
    gc.freeze()
    write_frame(control, b"")
    warm_up = WarmUp(library)
    forks: dict[int, _Fork] = {}
    while True:
        wait_s = None if warm_up.is_done else 0.0
        ready, _, _ = select.select([control.fileno(), *forks], [], [], wait_s)
        if not ready:
            warm_up.run_step()
        for descriptor in forks.keys() & set(ready):
            forks.pop(descriptor).end(descriptor)
        if control.fileno() not in ready:
            continue
        what, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not descriptors:
            return
        connections = [socket.socket(fileno=one) for one in descriptors]
        process_id = os.fork()
        if not process_id:
            control.close()
            for fork in forks.values():
                fork.close()
            try:
                _run_fork(what, connections, library, start.limits)
            finally:
                # Without the clean-up of the parent's objects.
                os._exit(0)
        forks[os.pidfd_open(process_id)] = fork = _Fork(process_id, connections)
        if what == MAKE_MASKS:
            fork.close()


class _Fork(NamedTuple):
    process_id: int
    connections: list[socket.socket]

    def end(self, descriptor: int) -> None:
        """Reap the fork, and report on its socket if a signal has killed it."""
        os.close(descriptor)
        _, status = os.waitpid(self.process_id, 0)
        for connection in self.connections:
            if os.WIFSIGNALED(status):
                connection.settimeout(5.0)
                # The replica may have closed the socket.
                with contextlib.suppress(OSError):
                    write_frame(connection, msgspec.msgpack.encode(Died(os.WTERMSIG(status))))
        self.close()

    def close(self) -> None:
        """Close the sockets, which belong to the fork."""
        for connection in self.connections:
            connection.close()
        self.connections.clear()


def _run_fork(
    what: bytes, connections: list[socket.socket], library: XGrammarLibrary, limits: CompileLimits
) -> None:
    if what == MAKE_MASKS:
        masks, grammars = connections
        serve_masks(masks, grammars, library, memory_bytes=limits.mask_memory_bytes)
    else:
        (connection,) = connections
        _answer(connection, library, limits)


def _answer(connection: socket.socket, library: XGrammarLibrary, limits: CompileLimits) -> None:
    structure = read_message(connection, Structure)
    _limit(limits)
    try:
        text = grammar_text(structure)
        # Masks and ranks have priority, since whole batches wait for them.
        lower_priority(os.getpid(), NICENESS)
        grammar = _compiled(text, library, limits)
    except InvalidRequestError as error:
        answer: Compiled | Rejected = Rejected(str(error))
    except UnicodeDecodeError as error:
        # The library quotes an unexpected character only in part.
        message = bytes(error.object).decode(errors="replace")
        answer = Rejected(f"structure cannot be compiled: {_in_short(message)}.")
    # Whatever the library raises, the client gets an answer.
    except Exception as error:
        lift_memory_limit()
        if is_out_of_memory(error):
            what = (
                f"cannot be compiled within {limits.memory_bytes >> 20} MiB of memory; {_SMALLER}"
            )
        else:
            what = f"cannot be compiled: {_in_short(str(error) or type(error).__name__)}"
        answer = Rejected(f"structure {what}.")
    else:
        lift_memory_limit()
        answer = Compiled(grammar)
    body = msgspec.msgpack.encode(answer)
    if len(body) > limits.answer_bytes:
        what = f"cannot be compiled to at most {limits.answer_bytes >> 20} MiB; {_SMALLER}"
        body = msgspec.msgpack.encode(Rejected(f"structure {what}."))
    # Sending takes as long as the reader does.
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    connection.settimeout(5.0)
    write_frame(connection, body)


def _limit(limits: CompileLimits) -> None:
    """Have the kernel kill this process when it exceeds the limits."""
    # Not handled by Python, which does not run while the library computes.
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.compile_s)
    signal.setitimer(signal.ITIMER_REAL, limits.wait_s)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(limits.memory_bytes)


def _compiled(text: str, library: XGrammarLibrary, limits: CompileLimits) -> GrammarText:
    """Compile a grammar and try it out. Raises InvalidRequestError, or errors of the library."""
    compiled, _ = library.compile_grammar(text)
    if library.num_state_bytes(compiled) > limits.state_bytes:
        # Its JSON would take far more time and memory than itself.
        started_s = time.process_time()
        compiled, _ = library.compile_alone(text)
        if time.process_time() - started_s < limits.repeat_s:
            _try_out(library, compiled, limits)
            return GrammarText(text.encode(), is_compiled=False)
    written = library.json_of(compiled)
    compiled, _ = library.load_grammar(written)
    _try_out(library, compiled, limits)
    return GrammarText(written.encode())


# Any: the library's own type.
def _try_out(library: XGrammarLibrary, compiled: Any, limits: CompileLimits) -> None:
    """Follow a grammar for some random tokens. Raises InvalidRequestError if it takes too long."""
    matcher = library.matcher(compiled)
    generator = random.Random(0)
    until_s = time.thread_time() + _TRIAL_S
    for index in range(_NUM_TRIAL_TOKENS):
        started_s = time.thread_time()
        allowed = matcher.allowed_ids(library.vocab_size)
        if not len(allowed):
            if index == 0 and not matcher.is_complete:
                raise invalid_field(
                    "structure", "matches no text that the model's tokens can form."
                )
            return
        matcher.accept_token(int(allowed[generator.randrange(len(allowed))]))
        if time.thread_time() - started_s > limits.mask_s:
            raise invalid_field(
                "structure", "is too ambiguous: computing its masks takes too long."
            )
        if matcher.has_ended or time.thread_time() > until_s:
            return


def _in_short(message: str) -> str:
    # Without the position in the library's sources.
    line = " ".join(message.split())
    return line.rpartition(".cc:")[2].partition(": ")[2][:200].rstrip(".") or line[:200].rstrip(".")


class WarmUp:
    """Compiles strings of each length, a few lengths a step."""

    def __init__(self, library: XGrammarLibrary) -> None:
        self._library = library
        self._texts = self._grammars()
        self.is_done = False
        """Whether all lengths are compiled."""

    def run_step(self) -> None:
        """Compile the next lengths at low priority."""
        # In a thread, since a process cannot raise its priority again. It has ended when this
        # returns, so that a fork loses no thread.
        thread = threading.Thread(target=self._run_step)
        thread.start()
        thread.join()

    def _run_step(self) -> None:
        lower_priority(threading.get_native_id(), NICENESS)
        try:
            self._library.warm_up(next(self._texts))
        except (StopIteration, RuntimeError):
            # A failure is not reported, since no client requested it.
            self.is_done = True

    def _grammars(self) -> Iterator[str]:
        for minimum, maximum in _LENGTHS:
            rules: dict[str, Expression] = {}
            start = limited_string(rules, minimum, maximum)
            yield write_ebnf(rules, start)


if __name__ == "__main__":
    main()
