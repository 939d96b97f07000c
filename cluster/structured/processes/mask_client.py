"""The replica's client of the process that makes masks.

Its state can be replayed to another process, so that its death ends only the sequence that caused
it and those of the same grammar.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec

from cluster.structured.processes.compiled_grammar import CompiledGrammar, MatcherHandle
from cluster.structured.processes.frames import read_message, write_frame
from cluster.structured.processes.mask_batch import LATE_MASK_S
from cluster.structured.processes.messages import (
    GrammarLoaded,
    LoadFailed,
    LoadGrammar,
    StepQuery,
    StepReply,
)
from cluster.structured.processes.sequence_matcher import REJECTED_TOKEN, allowed_cpu_s
from pagedray.errors import EngineError, OverloadedError
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cluster.structured.processes.compiled_grammar import Outcome
    from cluster.structured.processes.messages import MaskQuery
    from pagedray.request import Request

__all__ = ["MaskClient"]

logger = logging.getLogger(__name__)

_REPLY_MARGIN_S = 5.0
"""Time for a reply beyond the limit that the process itself keeps."""
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
        """The process is killed if it takes `step_s` longer than the masks of a step may.

        For a sequence that is queried alone, since it may be the cause of that, after `alone_s`.
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

    def masks(self, asked: Sequence[_Asked]) -> list[Outcome]:
        """Return the mask, or how the sequence ends, for each matcher and its tokens.

        It never raises.
        """
        if not asked:
            return []
        outcomes: dict[int, Outcome] = {}
        with self._lock:
            self._connection.close_orphaned()
            try:
                self._query_all(dict(enumerate(asked)), outcomes, self._step_s)
            except _MaskProcessDiedError as error:
                logger.warning("Querying each sequence alone. %s", error)
                # Only the cause ends, with the other sequences of its grammar: each of those would
                # cost a process too.
                crashing: set[CompiledGrammar] = set()
                for row, one in enumerate(asked):
                    if row not in outcomes:
                        outcomes[row] = self._query_alone(one, crashing)
        return [outcomes[row] for row in range(len(asked))]

    def close(self) -> None:
        """End the process and the calls that wait for it."""
        self._connection.shut_down()
        with self._lock:
            self._connection.close()

    def _query_alone(self, asked: _Asked, crashing: set[CompiledGrammar]) -> Outcome:
        """Return the outcome of one row; add its grammar to `crashing` if that ends a process."""
        matcher = asked[0]
        grammar = matcher.grammar
        if grammar in crashing:
            return _failed(matcher)
        outcomes: dict[int, Outcome] = {}
        try:
            crashing |= self._query_all({0: asked}, outcomes, self._alone_s)
        except _MaskProcessDiedError as error:
            logger.warning("Ending all sequences of a grammar with an error. %s", error)
            crashing.add(grammar)
            return _failed(matcher) if error.is_killed else FinishReason.ERROR
        return outcomes[0]

    def _query_all(
        self, asked: dict[int, _Asked], outcomes: dict[int, Outcome], limit_s: float
    ) -> set[CompiledGrammar]:
        """Query until each row has an outcome; return the grammars that ended a process.

        Raises _MaskProcessDiedError.
        """
        crashing: set[CompiledGrammar] = set()
        while asked:
            rows = list(asked)
            reply = self._query(list(asked.values()), limit_s)
            size = self.num_mask_bytes
            for index, row in enumerate(rows):
                mask = reply.words[index * size : (index + 1) * size]
                outcomes[row] = reply.finish_reasons.get(index) or mask
            # Other sequences of the grammar may be as slow, and there may be many.
            crashing |= {asked[rows[index]][0].grammar for index in reply.offenders}
            left = [rows[index] for index in reply.missing]
            for row in left:
                del outcomes[row]
                if asked[row][0].grammar in crashing:
                    outcomes[row] = _failed(asked[row][0])
            asked = {row: asked[row] for row in left if row not in outcomes}
        return crashing

    def _query(self, asked: Sequence[_Asked], limit_s: float) -> StepReply:
        process = self._connection.process_with({matcher.grammar for matcher, _ in asked})
        queries = [matcher.query(token_ids, process.incarnation) for matcher, token_ids in asked]
        limit_s += sum(LATE_MASK_S + allowed_cpu_s(query) for query in queries)
        reply = self._connection.exchange(process, queries, limit_s)
        for (matcher, _), cpu_s in zip(asked, reply.cpu_s, strict=True):
            matcher.note_cpu_time(cpu_s)
        for row, error in reply.errors.items():
            logger.warning("Ending a sequence with an error: %s.", error)
            if error != REJECTED_TOKEN:
                asked[row][0].error = error
        return reply


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

    def exchange(
        self, process: _MaskProcess, queries: list[MaskQuery], limit_s: float
    ) -> StepReply:
        """Return the reply to the queries of a step. Raises _MaskProcessDiedError."""
        sequence_ids, grammar_ids = self.ended_sequence_ids, self.ended_grammar_ids
        query = StepQuery(queries, _drained(sequence_ids), _drained(grammar_ids), limit_s)
        try:
            process.masks.settimeout(limit_s + _REPLY_MARGIN_S)
            write_frame(process.masks, msgspec.msgpack.encode(query))
            reply: StepReply = read_message(process.masks, StepReply)
        except (OSError, EOFError) as error:
            self._forget(process)
            raise _died(error, is_killed=True) from error
        if reply.offenders:
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
        with self._lock:
            # A thread that loads a grammar may have started another process.
            if self._process is process:
                self._disconnect()

    def _disconnect(self) -> None:
        if self._process is not None:
            self._process.masks.close()
            self._process.grammars.close()
            self._process = None


def _died(error: Exception, *, is_killed: bool = False) -> _MaskProcessDiedError:
    return _MaskProcessDiedError(f"The mask process died: {error!r}.", is_killed=is_killed)


def _failed(matcher: MatcherHandle) -> FinishReason:
    """Return the end of a sequence whose structure has ended a process, or would."""
    matcher.error = "its masks take too much time or memory"
    return FinishReason.ERROR


def _drained(items: deque[_Item]) -> list[_Item]:
    drained = []
    # Two threads may drain at once.
    with contextlib.suppress(IndexError):
        while True:
            drained.append(items.popleft())
    return drained
