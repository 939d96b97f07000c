"""The replica's client of the process that makes masks.

Its state can be replayed to another process, so that its death ends only the sequence that caused
it and those of the same grammar.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import threading
import time
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec

from cluster.structured.processes.compiled_grammar import CompiledGrammar, MatcherHandle
from cluster.structured.processes.frames import read_message, write_frame
from cluster.structured.processes.messages import (
    GrammarLoaded,
    LoadFailed,
    LoadGrammar,
    MaskReply,
    StepQuery,
)
from pagedray.errors import EngineError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cluster.structured.processes.compiled_grammar import Outcome
    from cluster.structured.processes.messages import MaskQuery
    from pagedray.request import Request

__all__ = ["MaskClient"]

logger = logging.getLogger(__name__)

_REPLY_MARGIN_S = 5.0
"""Time for a reply beyond the limit that the process itself keeps."""
_PATIENCE_SHARE = 0.75
"""Of the time that a caller waits: what the process waits for quick masks."""
_MAX_PATIENCE_S = 60.0
_COSTLY_SHARE = 0.5
"""Of the time that a caller waits: CPU time of a mask that is not worth waiting for."""
_TOO_COSTLY = "its masks take too much time or memory"
"""Why sequences end whose structure has ended a process, or would."""
_LOAD_TIMEOUT_S = 60.0
_MAX_INCARNATIONS = 3
"""Processes that may die, one after another, before a query fails."""

_Item = TypeVar("_Item")
_Asked = tuple[MatcherHandle, "Sequence[int]"]


class MaskClient:
    """Queries masks, one thread at a time, and loads grammars, for any thread."""

    def __init__(
        self,
        connect: Callable[[], tuple[socket.socket, socket.socket]],
        *,
        num_mask_bytes: int,
        max_tenant_bytes: int,
        step_s: float = 5.0,
        alone_s: float = 2.0,
    ) -> None:
        """The process is killed if a mask keeps it from reading its clock for `step_s`.

        For a sequence that is queried alone, since it may be the cause of that, for `alone_s`.
        """
        self.num_mask_bytes = num_mask_bytes
        """Bytes of a mask."""
        self._connection = _MaskConnection(connect, max_tenant_bytes=max_tenant_bytes)
        self._step_s = step_s
        self._alone_s = alone_s
        self._ids = count()
        self._lock = threading.Lock()
        """Held by the thread that queries."""

    def load_grammar(self, text: bytes, *, tenant: str = "") -> tuple[CompiledGrammar, int]:
        """Return a compiled grammar of a tenant and its size in bytes.

        Raises EngineError, or OverloadedError if it does not fit in memory.
        """
        note_end = self._connection.ended_grammar_ids.append
        grammar = CompiledGrammar(self, next(self._ids), text, tenant, note_end)
        try:
            num_bytes = self._connection.load_grammar(grammar)
        except _MaskProcessDiedError:
            # Another grammar may have been the cause.
            try:
                num_bytes = self._connection.load_grammar(grammar)
            except _MaskProcessDiedError as error:
                raise EngineError(f"Failed to load a compiled grammar. {error}") from error
        self._connection.count_memory(grammar, num_bytes)
        return grammar, num_bytes

    def matcher(self, grammar: CompiledGrammar, request: Request) -> MatcherHandle:
        """Return a matcher at the start of a continuation of the request."""
        note_end = self._connection.ended_sequence_ids.append
        return MatcherHandle(grammar, next(self._ids), request, note_end)

    def masks(
        self, asked: Sequence[_Asked], *, num_awaited: int, wait_s: float
    ) -> list[Outcome | None]:
        """Return the mask, or how the sequence ends, for each matcher and its tokens.

        It is None if it is not made yet: of the first `num_awaited` after `wait_s`, of the others
        now. The caller must ask for it again in each later call. Never raises; after the death of
        the process, it waits for all of them.
        """
        if not asked:
            return []
        with self._lock:
            self._connection.close_orphaned()
            try:
                self._query_all(asked, num_awaited, wait_s, self._step_s)
            except _MaskProcessDiedError as error:
                logger.warning("Querying each sequence alone. %s", error)
                # Only the cause ends, with the other sequences of its grammar: each of those would
                # cost a process too.
                crashing: set[CompiledGrammar] = set()
                for one in asked:
                    self._query_alone(one, crashing)
        return [matcher.outcome_after(token_ids) for matcher, token_ids in asked]

    def close(self) -> None:
        """End the process and the calls that wait for it."""
        self._connection.shut_down()
        with self._lock:
            self._connection.close()

    def _query_alone(self, asked: _Asked, crashing: set[CompiledGrammar]) -> None:
        """Wait for the outcome of one; add its grammar to `crashing` if that ends a process."""
        matcher, token_ids = asked
        if matcher.outcome_after(token_ids) is not None:
            return
        if matcher.grammar in crashing:
            matcher.note_failure(token_ids, _TOO_COSTLY)
            return
        try:
            crashing |= self._query_all([asked], 1, math.inf, self._alone_s)
        except _MaskProcessDiedError as error:
            logger.warning("Ending all sequences of a grammar with an error. %s", error)
            crashing.add(matcher.grammar)
            matcher.note_failure(token_ids, _TOO_COSTLY if error.is_killed else "")

    def _query_all(
        self, asked: Sequence[_Asked], num_awaited: int, wait_s: float, limit_s: float
    ) -> set[CompiledGrammar]:
        """Query masks and wait for the first ones; return the grammars that ended a process.

        Raises _MaskProcessDiedError.
        """
        crashing: set[CompiledGrammar] = set()
        until_s = time.monotonic() + wait_s
        while left := _without_outcome(asked):
            process = self._connection.process_with({matcher.grammar for matcher, _ in left})
            queries = [
                matcher.query(token_ids, process.incarnation, costly_s=_COSTLY_SHARE * wait_s)
                for matcher, token_ids in left
                if not matcher.is_pending(process.incarnation)
            ]
            if queries:
                self._connection.send_queries(process, queries, wait_s, limit_s)
            is_awaited = bool(_without_outcome(asked[:num_awaited]))
            left_s = max(0.0, until_s - time.monotonic()) if is_awaited else 0.0
            reply = self._connection.receive_reply(process, left_s, limit_s)
            if reply is None:
                break
            crashing |= _apply(reply, left)
        return crashing


def _without_outcome(asked: Sequence[_Asked]) -> list[_Asked]:
    return [one for one in asked if one[0].outcome_after(one[1]) is None]


def _apply(reply: MaskReply, asked: Sequence[_Asked]) -> set[CompiledGrammar]:
    """Record the masks that were asked for; return the grammars that ended the process."""
    matchers = {matcher.id: matcher for matcher, _ in asked}
    crashing: set[CompiledGrammar] = set()
    for made in reply.masks:
        # Others belong to sequences that have ended.
        if made.sequence_id not in matchers:
            continue
        matcher = matchers[made.sequence_id]
        matcher.note_made(made)
        if made.error:
            logger.warning("Ending a sequence with an error: %s.", made.error)
        if made.is_offender:
            crashing.add(matcher.grammar)
    # Other sequences of the grammar may be as slow, and there may be many.
    for matcher, token_ids in _without_outcome(asked):
        if matcher.grammar in crashing:
            matcher.note_failure(token_ids, _TOO_COSTLY)
    return crashing


class _MaskProcessDiedError(Exception):
    """The process died during a query, or could not be started."""

    def __init__(self, message: str, *, is_killed: bool = False) -> None:
        """`is_killed` if it died while it made masks."""
        super().__init__(message)
        self.is_killed = is_killed


class _MaskProcess(NamedTuple):
    """One incarnation of the process."""

    incarnation: int
    """Its number; it knows nothing that was sent to an earlier one."""
    masks: socket.socket
    grammars: socket.socket


class _MaskConnection:
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
        self._process: _MaskProcess | None = None
        self._orphaned: deque[socket.socket] = deque()
        """Sockets for masks of dead processes, to be closed by the thread that reads them."""
        self._num_incarnations = 0
        self._unanswered: set[int] = set()
        """The sequences whose masks were asked for."""
        self._heard_s = 0.0
        """When the process replied last, or was asked while it had nothing to do."""

    def load_grammar(self, grammar: CompiledGrammar) -> int:
        """Load a grammar into the process; return its size in bytes.

        Raises EngineError, OverloadedError if it does not fit in memory, or _MaskProcessDiedError.
        """
        with self._lock:
            process = self._process
            if process is None:
                self._num_incarnations += 1
                process = self._process = _MaskProcess(self._num_incarnations, *self._connect())
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
        """Count a grammar against its tenant's memory. Raises OverloadedError if that is full."""
        with self._lock:
            same = [one for one in self._grammars.values() if one.tenant == grammar.tenant]
            total = num_bytes + sum(one.num_bytes for one in same)
            if total > self._max_tenant_bytes:
                raise OverloadedError(
                    f"The structures of this tenant would take {total >> 20} MiB of memory; "
                    f"at most {self._max_tenant_bytes >> 20} MiB are allowed."
                )
            grammar.num_bytes = num_bytes
            self._grammars[grammar.id] = grammar

    def process_with(self, grammars: Iterable[CompiledGrammar]) -> _MaskProcess:
        """Return a process that has these grammars. Raises _MaskProcessDiedError."""
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
                # No process could be started, or it cannot load what an earlier one could.
                raise _MaskProcessDiedError(str(error)) from error
        raise _MaskProcessDiedError(f"The mask process died {_MAX_INCARNATIONS} times in a row.")

    def send_queries(
        self, process: _MaskProcess, queries: list[MaskQuery], wait_s: float, limit_s: float
    ) -> None:
        """Ask for masks. Raises _MaskProcessDiedError."""
        # The process replies in time for what arrives last to be read.
        patience_s = min(_PATIENCE_SHARE * wait_s, _MAX_PATIENCE_S)
        sequence_ids, grammar_ids = _drained(self.ended_sequence_ids), self.ended_grammar_ids
        query = StepQuery(queries, sequence_ids, _drained(grammar_ids), patience_s, limit_s)
        self._unanswered.difference_update(sequence_ids)
        if not self._unanswered:
            self._heard_s = time.monotonic()
        self._unanswered.update(one.sequence_id for one in queries)
        try:
            process.masks.settimeout(limit_s + _REPLY_MARGIN_S)
            write_frame(process.masks, msgspec.msgpack.encode(query))
        except OSError as error:
            self._forget(process)
            raise _died(error, is_killed=True) from error

    def receive_reply(
        self, process: _MaskProcess, wait_s: float, limit_s: float
    ) -> MaskReply | None:
        """Return the next reply, or None if there is none within `wait_s`.

        Raises _MaskProcessDiedError, also if the process has been silent for longer than `limit_s`.
        """
        silent_s = self._heard_s + limit_s + _REPLY_MARGIN_S - time.monotonic()
        try:
            if not _is_readable(process.masks, min(wait_s, max(0.0, silent_s))):
                if wait_s < silent_s:
                    return None
                raise TimeoutError("no reply")
            reply: MaskReply = read_message(process.masks, MaskReply)
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

    def _forget(self, process: _MaskProcess) -> None:
        self._unanswered.clear()
        with self._lock:
            # A thread that loads a grammar may have started another process.
            if self._process is process:
                self._disconnect()

    def _disconnect(self) -> None:
        if self._process is not None:
            self._process.masks.close()
            self._process.grammars.close()
            self._process = None


def _is_readable(connection: socket.socket, wait_s: float) -> bool:
    """Wait until there is something to read, or the other end is closed."""
    # Unlike `select`, for any number of open files.
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(1e3 * wait_s))


def _died(error: Exception, *, is_killed: bool = False) -> _MaskProcessDiedError:
    return _MaskProcessDiedError(f"The mask process died: {error!r}.", is_killed=is_killed)


def _drained(items: deque[_Item]) -> list[_Item]:
    drained = []
    # Two threads may drain at once.
    with contextlib.suppress(IndexError):
        while True:
            drained.append(items.popleft())
    return drained
