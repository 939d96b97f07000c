"""The connection of a replica to the process that makes masks, which it starts when it is needed.

Grammars are loaded over one socket and masks queried over another, so that no step waits until a
grammar is loaded.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec

from cluster.structured.grammar.expressions import invalid_structure
from cluster.structured.processes.frames import (
    read_message,
    write_frame,
    write_frame_and_read,
)
from cluster.structured.processes.messages import (
    GrammarLoaded,
    LoadFailed,
    LoadGrammar,
    MaskReply,
    StepQuery,
)
from pagedray.errors import EngineError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cluster.structured.processes.compiled_grammar import CompiledGrammar
    from cluster.structured.processes.messages import MaskQuery

__all__ = ["MaskConnection", "MaskProcess", "MaskProcessDiedError"]

_REPLY_MARGIN_S = 5.0
"""Time for a reply beyond the limit that the process itself keeps."""
_PATIENCE_SHARE = 0.75
"""Share of the time that a caller waits, for which the process waits for quick masks."""
_MAX_PATIENCE_S = 60.0
_LOAD_TIMEOUT_S = 60.0
_MAX_INCARNATIONS = 3
"""Processes that may die, one after another, before a query fails."""

_Item = TypeVar("_Item")


class MaskProcessDiedError(Exception):
    """The process died during a query, or could not be started."""

    def __init__(self, message: str, *, is_killed: bool = False) -> None:
        """`is_killed` if it died while it made masks."""
        super().__init__(message)
        self.is_killed = is_killed


class MaskProcess(NamedTuple):
    """A fork that makes masks, from its start until it exits or is replaced."""

    incarnation: int
    """The number of this incarnation, which has no state of earlier incarnations."""
    masks: socket.socket
    grammars: socket.socket


class MaskConnection:
    """Starts the process when it is needed. One thread at a time exchanges queries."""

    def __init__(
        self, connect: Callable[[], tuple[socket.socket, socket.socket]], *, max_tenant_bytes: int
    ) -> None:
        """`connect` starts a process and returns its sockets for masks and for grammars.

        It raises EngineError. The grammars of one tenant may take `max_tenant_bytes`.
        """
        self._connect = connect
        self._max_tenant_bytes = max_tenant_bytes
        self.ended_sequence_ids: deque[int] = deque()
        """Sent with the next query. Any thread may append."""
        self.ended_grammar_ids: deque[int] = deque()
        """Sent with the next message. Any thread may append."""
        self._lock = threading.Lock()
        """Held to load a grammar, and to change the fields below."""
        self._grammars: WeakValueDictionary[int, CompiledGrammar] = WeakValueDictionary()
        """Grammars in use or cached."""
        # Read without the lock: no step waits until a grammar is loaded.
        self._process: MaskProcess | None = None
        self._orphaned: deque[socket.socket] = deque()
        """Sockets for masks of dead processes, to be closed by the thread that reads them."""
        self._num_incarnations = 0
        self._unanswered: set[int] = set()
        """The sequences with requested masks."""
        self._early: deque[tuple[MaskProcess, MaskReply]] = deque()
        """Replies that came while queries were sent."""
        self._heard_s = 0.0
        """When the process last replied, or was sent work while it had none."""

    def load_grammar(self, grammar: CompiledGrammar) -> int:
        """Load a grammar into the process; return its size in bytes.

        Raises EngineError, OverloadedError if it does not fit in memory, or MaskProcessDiedError.
        """
        with self._lock:
            process = self._process
            if process is None:
                self._num_incarnations += 1
                process = self._process = MaskProcess(self._num_incarnations, *self._connect())
            try:
                process.grammars.settimeout(_LOAD_TIMEOUT_S)
                load = LoadGrammar(grammar.id, grammar.text, _drained(self.ended_grammar_ids))
                write_frame(process.grammars, msgspec.msgpack.encode(load))
                reply: GrammarLoaded | LoadFailed = read_message(
                    process.grammars, GrammarLoaded | LoadFailed
                )
            except (OSError, EOFError) as error:
                # Another thread may be reading masks that the process sent before it died.
                self._orphaned.append(process.masks)
                process.grammars.close()
                self._process = None
                raise _died(error) from error
            if isinstance(reply, LoadFailed):
                if reply.is_out_of_memory:
                    raise OverloadedError(
                        "The structures in use take all memory available to them."
                    )
                raise EngineError(f"Failed to load a compiled grammar: {reply.message}.")
            grammar.incarnation = process.incarnation
            return reply.num_bytes

    def count_memory(self, grammar: CompiledGrammar, num_bytes: int) -> None:
        """Count a grammar against its tenant's memory.

        Raises OverloadedError if that is full, and InvalidRequestError if it never has room for it.
        """
        most_mib = self._max_tenant_bytes >> 20
        if num_bytes > self._max_tenant_bytes:
            raise invalid_structure(
                f"structure takes {num_bytes >> 20} MiB of memory; at most {most_mib} MiB are "
                "allowed."
            )
        with self._lock:
            same = [one for one in self._grammars.values() if one.tenant == grammar.tenant]
            total = num_bytes + sum(one.num_bytes for one in same)
            if total > self._max_tenant_bytes:
                raise OverloadedError(
                    f"The structures of this tenant would take {total >> 20} MiB of memory; "
                    f"at most {most_mib} MiB are allowed."
                )
            grammar.num_bytes = num_bytes
            self._grammars[grammar.id] = grammar

    def process_with(self, grammars: Iterable[CompiledGrammar]) -> MaskProcess:
        """Return a process that has these grammars. Raises MaskProcessDiedError."""
        for _ in range(_MAX_INCARNATIONS):
            process = self._process
            missing = [
                one for one in grammars if process is None or one.incarnation != process.incarnation
            ]
            if process is not None and not missing:
                return process
            try:
                for grammar in missing:
                    self.load_grammar(grammar)
            except (EngineError, OverloadedError, OSError) as error:
                # No process could be started, or it cannot load a grammar that an earlier process
                # could load.
                raise MaskProcessDiedError(str(error)) from error
        raise MaskProcessDiedError(f"The mask process died {_MAX_INCARNATIONS} times in a row.")

    def send_queries(
        self, process: MaskProcess, queries: list[MaskQuery], wait_s: float, limit_s: float
    ) -> None:
        """Ask for masks. Raises MaskProcessDiedError.

        If the process replies meanwhile that it exits, the rest is not sent.
        """
        # The process replies early enough for the last masks to be read in time.
        patience_s = min(_PATIENCE_SHARE * wait_s, _MAX_PATIENCE_S)
        sequence_ids, grammar_ids = _drained(self.ended_sequence_ids), self.ended_grammar_ids
        query = StepQuery(queries, sequence_ids, _drained(grammar_ids), patience_s, limit_s)
        self._unanswered.difference_update(sequence_ids)
        if not self._unanswered:
            self._heard_s = time.monotonic()
        self._unanswered.update(one.sequence_id for one in queries)
        try:
            process.masks.settimeout(limit_s + _REPLY_MARGIN_S)
            write_frame_and_read(
                process.masks,
                msgspec.msgpack.encode(query),
                lambda: self._read_early(process),
                timeout_s=limit_s + _REPLY_MARGIN_S,
            )
        except (OSError, EOFError) as error:
            self._forget(process)
            raise _died(error, is_killed=True) from error

    def receive_reply(
        self, process: MaskProcess, wait_s: float, limit_s: float
    ) -> MaskReply | None:
        """Return the next reply, or None if there is none within `wait_s`.

        Raises MaskProcessDiedError, also if the process has been silent for longer than `limit_s`.
        """
        reply = self._take_early(process)
        left_s = self._heard_s + limit_s + _REPLY_MARGIN_S - time.monotonic()
        try:
            if reply is None:
                if not _is_readable(process.masks, min(wait_s, max(0.0, left_s))):
                    if wait_s < left_s:
                        return None
                    raise TimeoutError("no reply")
                reply = _read_reply(process)
        except (OSError, EOFError, ValueError) as error:
            self._forget(process)
            raise _died(error, is_killed=True) from error
        self._heard_s = time.monotonic()
        self._unanswered.difference_update(mask.sequence_id for mask in reply.masks)
        if reply.is_last:
            self._forget(process)
        return reply

    def shut_down(self) -> None:
        """Wake the threads that wait for the process."""
        process = self._process
        connected = () if process is None else (process.masks, process.grammars)
        for connection in (*self._orphaned.copy(), *connected):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process. Called by the thread that exchanges queries, or after it."""
        with self._lock:
            self._disconnect()
        self.close_orphaned()

    def close_orphaned(self) -> None:
        """Close the sockets of dead processes. Called by the thread that exchanges queries."""
        for connection in _drained(self._orphaned):
            connection.close()

    def _read_early(self, process: MaskProcess) -> bool:
        """Keep a reply for later; return whether the process still reads queries."""
        reply = _read_reply(process)
        self._early.append((process, reply))
        return not reply.is_last

    def _take_early(self, process: MaskProcess) -> MaskReply | None:
        while self._early:
            sender, reply = self._early.popleft()
            # Another incarnation was asked again for all that is needed.
            if sender is process:
                return reply
        return None

    def _forget(self, process: MaskProcess) -> None:
        self._unanswered.clear()
        # A thread that waits for a process that hangs, to load a grammar, holds the lock.
        with contextlib.suppress(OSError):
            process.grammars.shutdown(socket.SHUT_RDWR)
        with self._lock:
            # A thread that loads a grammar may have started another process.
            if self._process is process:
                self._disconnect()

    def _disconnect(self) -> None:
        if self._process is not None:
            self._process.masks.close()
            self._process.grammars.close()
            self._process = None


def _read_reply(process: MaskProcess) -> MaskReply:
    reply: MaskReply = read_message(process.masks, MaskReply)
    return reply


def _is_readable(connection: socket.socket, wait_s: float) -> bool:
    """Wait until there is something to read, or the other end is closed."""
    # Unlike `select`, for any number of open files.
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(1e3 * wait_s))


def _died(error: Exception, *, is_killed: bool = False) -> MaskProcessDiedError:
    # Clients see this, for whom numbers of errors and names of their types mean nothing.
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return MaskProcessDiedError(f"The mask process died: {text.rstrip('.')}.", is_killed=is_killed)


def _drained(items: deque[_Item]) -> list[_Item]:
    drained = []
    # Two threads may drain at once.
    with contextlib.suppress(IndexError):
        while True:
            drained.append(items.popleft())
    return drained
