"""The replica's client of the process that makes masks, which it starts when needed.

Its state can be replayed to another process, so that the death of a process ends only the sequence
that caused it and other sequences of the same grammar. Grammars are loaded over one socket and
masks queried over another, so that no step waits until a grammar is loaded.
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
from msgspec.structs import replace

from cluster.structured.child_process import read_message, write_frame
from cluster.structured.grammar.expressions import invalid_structure
from cluster.structured.messages import (
    REJECTED_TOKEN,
    GrammarLoaded,
    LoadFailed,
    LoadGrammar,
    MadeMask,
    MaskQuery,
    MaskReply,
    MatcherStart,
    StepQuery,
)
from pagedray.errors import EngineError, OverloadedError
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cluster.structured.messages import GrammarText
    from pagedray.request import AskedMasks, Request

__all__ = ["CompiledGrammar", "MaskClient", "MatcherHandle"]

logger = logging.getLogger(__name__)

Outcome = bytes | FinishReason
"""A mask, or how its sequence ends."""

_PATIENCE_SHARE = 0.75
"""Share of the time that a caller waits, for which the process waits for quick masks."""
_MAX_PATIENCE_S = 60.0
_SEND_TIMEOUT_S = 10.0
"""The process reads queries at once, or has hung and is ended by its kernel."""
_LOAD_TIMEOUT_S = 60.0
_MAX_INCARNATIONS = 3
"""Processes that may die, one after another, before a query fails."""
_Item = TypeVar("_Item")


class CompiledGrammar:
    """A compiled structure, which any number of sequences may follow."""

    def __init__(
        self,
        source: MaskClient,
        grammar_id: int,
        text: GrammarText,
        tenant: str,
        note_end: Callable[[int], None],
    ) -> None:
        self.id = grammar_id
        self.text = text
        self.tenant = tenant
        self.num_bytes = 0
        """The size of the grammar in the mask process, once it is loaded."""
        self.incarnation = 0
        """The incarnation of the mask process that it was last loaded into."""
        self.has_drafts = True
        """Whether masks behind drafts are made, which have ended no process so far."""
        self._source = source
        self._note_end = note_end

    def __del__(self) -> None:
        self._note_end(self.id)

    @property
    def num_mask_bytes(self) -> int:
        """Size of a mask in bytes."""
        return self._source.num_mask_bytes

    def matcher(self, request: Request) -> MatcherHandle:
        """Return a matcher at the start of a completion of the request."""
        return self._source.matcher(self, request)

    def masks(
        self, asked: Sequence[AskedMasks], *, num_awaited: int, wait_s: float
    ) -> list[Outcome | None]:
        """Return the masks of matchers, of this or other grammars; see `MaskClient.masks`."""
        return self._source.masks(asked, num_awaited=num_awaited, wait_s=wait_s)


class MatcherHandle:
    """The replica's handle of one sequence's matcher in the mask process."""

    def __init__(
        self,
        grammar: CompiledGrammar,
        sequence_id: int,
        request: Request,
        note_end: Callable[[int], None],
    ) -> None:
        sampling = request.sampling
        structure = sampling.structure
        self.grammar = grammar
        self.error = ""
        """Why the structure ended the sequence with an error; empty if it did not."""
        self.is_free = False
        """Whether the sequence needs no more masks."""
        self.forced_ids: Sequence[int] = ()
        """Tokens that most likely follow the tokens and drafts of the last masks."""
        self.id = sequence_id
        """The id of the sequence in the mask process."""
        self._note_end = note_end
        self._start = MatcherStart(
            grammar.id,
            sampling.min_tokens,
            sampling.ignore_eos,
            # Without a structure they are tokens like others if they are ignored.
            () if structure is None and sampling.ignore_eos else request.eos_token_ids,
            tuple(sampling.stop_token_ids),
            reasoning=request.reasoning,
            mark="" if structure is None else structure.mark,
            has_text_before_mark=structure is not None and structure.kind == "calls",
            reasoning_budget=sampling.thinking_token_budget,
        )
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_sent = self._num_prompt_tokens
        self._incarnation = 0
        self._draft_ids: list[int] = []
        """The drafts of the last query."""
        self._outcome: Outcome | None = None
        self._cpu_s = 0.0
        self._mask_cpu_s = 0.0
        self._costly_s = 0.0

    def __del__(self) -> None:
        self._note_end(self.id)

    @property
    def is_costly(self) -> bool:
        """Whether its last mask took more CPU time than steps should wait for."""
        return self._mask_cpu_s > self._costly_s

    def outcome_after(self, token_ids: Sequence[int]) -> Outcome | None:
        """Return the outcome for all tokens of the sequence, or None if it is not known."""
        return self._outcome if len(token_ids) == self._num_sent else None

    def outcome_of(self, asked: AskedMasks) -> Outcome | None:
        """Return the outcome of the query, or None if it is not known."""
        outcome = self.outcome_after(asked.token_ids)
        if isinstance(outcome, bytes) and [*asked.draft_ids] != self._draft_ids:
            # The masks were made for a plan that did not get them in time.
            self.forced_ids = ()
            return outcome[: self.grammar.num_mask_bytes]
        return outcome

    def is_pending(self, incarnation: int) -> bool:
        """Return whether this incarnation of the process makes its mask."""
        return self._outcome is None and self._incarnation == incarnation

    def query(self, asked: AskedMasks, incarnation: int, *, costly_s: float) -> MaskQuery:
        """Return the query for the next masks; another incarnation gets all generated tokens.

        The mask is costly if it takes more than `costly_s` of CPU time.
        """
        start = None
        if incarnation != self._incarnation:
            self._incarnation, self._num_sent = incarnation, self._num_prompt_tokens
            start = replace(self._start, cpu_s=self._cpu_s)
        added = list(asked.token_ids[self._num_sent :])
        self._num_sent = len(asked.token_ids)
        self._outcome = None
        self._costly_s = costly_s
        self.forced_ids = ()
        has_drafts = self.grammar.has_drafts
        self._draft_ids = [*asked.draft_ids] if has_drafts else []
        return MaskQuery(
            self.id, added, start, self._draft_ids, asked.num_forced if has_drafts else 0
        )

    def note_made(self, made: MadeMask) -> None:
        """Record the reply to the query."""
        # Both are 0 for a mask that ended its process.
        self._cpu_s = max(self._cpu_s, made.cpu_s)
        self._mask_cpu_s = made.mask_cpu_s
        self._outcome = made.finish_reason or made.words
        self.is_free = made.is_free
        self.forced_ids = made.forced_ids
        if made.error != REJECTED_TOKEN:
            self.error = made.error

    def note_failure(self, token_ids: Sequence[int], error: str) -> None:
        """End the sequence with an error, empty for a defect, although there was no reply."""
        self.error = error
        self._num_sent = len(token_ids)
        self._outcome = FinishReason.ERROR


_COSTLY_SHARE = 0.5
"""A mask with more CPU time than this share of the time that a caller waits is not worth waiting
for."""
_TOO_COSTLY = "its masks take too much time or memory"
"""The reason for the end of sequences with a structure that has ended a process, or would."""


class MaskProcessDiedError(Exception):
    """The process died during a query, or could not be started."""

    def __init__(self, message: str, *, is_killed: bool = False) -> None:
        """`is_killed` if it died while it made masks."""
        super().__init__(message)
        self.is_killed = is_killed


class _MaskProcess(NamedTuple):
    """A fork that makes masks, from its start until it exits or is replaced."""

    incarnation: int
    """The number of this incarnation, which has no state of earlier incarnations."""
    masks: socket.socket
    grammars: socket.socket


class MaskClient:
    """Queries masks, one thread at a time, and loads grammars, for any thread."""

    def __init__(
        self,
        connect: Callable[[], tuple[socket.socket, socket.socket]],
        *,
        num_mask_bytes: int,
        max_tenant_bytes: int,
    ) -> None:
        """`connect` starts a process and returns its sockets for masks and for grammars.

        It raises EngineError. The grammars of one tenant may take `max_tenant_bytes`.
        """
        self.num_mask_bytes = num_mask_bytes
        """Number of bytes of a mask."""
        self._connect = connect
        self._max_tenant_bytes = max_tenant_bytes
        self._ids = count()
        self._query_lock = threading.Lock()
        """Held by the thread that queries."""
        # Any thread may append; they are sent with the next message.
        self._ended_sequence_ids: deque[int] = deque()
        self._ended_grammar_ids: deque[int] = deque()
        self._lock = threading.Lock()
        """Held to load a grammar, and to change the fields below."""
        self._grammars: WeakValueDictionary[int, CompiledGrammar] = WeakValueDictionary()
        """Grammars in use or cached."""
        # Read without the lock: no step waits until a grammar is loaded.
        self._process: _MaskProcess | None = None
        self._orphaned: deque[socket.socket] = deque()
        """Sockets for masks of dead processes, to be closed by the thread that queries."""
        self._num_incarnations = 0

    def load_grammar(self, text: GrammarText, *, tenant: str = "") -> tuple[CompiledGrammar, int]:
        """Return a compiled grammar of a tenant and its size in bytes.

        Raises EngineError, OverloadedError if it does not fit in memory, or InvalidRequestError if
        it never does.
        """
        note_end = self._ended_grammar_ids.append
        grammar = CompiledGrammar(self, next(self._ids), text, tenant, note_end)
        try:
            num_bytes = self._load(grammar)
        except MaskProcessDiedError:
            # Another grammar may have been the cause.
            try:
                num_bytes = self._load(grammar)
            except MaskProcessDiedError as error:
                raise EngineError(f"Failed to load a compiled grammar. {error}") from error
        self._count_memory(grammar, num_bytes)
        return grammar, num_bytes

    def matcher(self, grammar: CompiledGrammar, request: Request) -> MatcherHandle:
        """Return a matcher at the start of a completion of the request."""
        note_end = self._ended_sequence_ids.append
        return MatcherHandle(grammar, next(self._ids), request, note_end)

    def masks(
        self, asked: Sequence[AskedMasks], *, num_awaited: int, wait_s: float
    ) -> list[Outcome | None]:
        """Return the mask, or how the sequence ends, for each matcher and its tokens.

        It is None if it is not made yet: of the first `num_awaited` after `wait_s`, of the others
        now. The caller must ask for it again in each later call. Never raises; after the death of
        the process, it waits for all of them.
        """
        if not asked:
            return []
        with self._query_lock:
            self._close_orphaned()
            try:
                self._query_all(asked, num_awaited, wait_s)
            except MaskProcessDiedError as error:
                logger.warning("Querying each sequence alone. %s", error)
                for one in asked:
                    # They may be the cause, and no sequence needs them.
                    if one.draft_ids or one.num_forced:
                        one.matcher.grammar.has_drafts = False
                # Only the cause ends, with the other sequences of its grammar: each of them would
                # cost a process too.
                crashing: set[CompiledGrammar] = set()
                for one in asked:
                    self._query_alone(one, crashing)
        return [one.matcher.outcome_of(one) for one in asked]

    def close(self) -> None:
        """End the process and the calls that wait for it."""
        process = self._process
        connected = () if process is None else (process.masks, process.grammars)
        for connection in (*self._orphaned.copy(), *connected):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._query_lock:
            with self._lock:
                self._disconnect()
            self._close_orphaned()

    def _query_alone(self, asked: AskedMasks, crashing: set[CompiledGrammar]) -> None:
        """Wait for the outcome of a query; add its grammar to `crashing` if that ends a process."""
        matcher, token_ids, *_ = asked
        if matcher.outcome_after(token_ids) is not None:
            return
        if matcher.grammar in crashing:
            matcher.note_failure(token_ids, _TOO_COSTLY)
            return
        try:
            crashing |= self._query_all([asked], 1, math.inf)
        except MaskProcessDiedError as error:
            logger.warning("Ending all sequences of a grammar with an error. %s", error)
            crashing.add(matcher.grammar)
            matcher.note_failure(token_ids, _TOO_COSTLY if error.is_killed else "")

    def _query_all(
        self, asked: Sequence[AskedMasks], num_awaited: int, wait_s: float
    ) -> set[CompiledGrammar]:
        """Query masks and wait for the first masks; return the grammars that ended a process.

        Raises MaskProcessDiedError.
        """
        crashing: set[CompiledGrammar] = set()
        until_s = time.monotonic() + wait_s
        while left := _without_outcome(asked):
            process = self._process_with({one.matcher.grammar for one in left})
            queries = [
                one.matcher.query(one, process.incarnation, costly_s=_COSTLY_SHARE * wait_s)
                for one in left
                if not one.matcher.is_pending(process.incarnation)
            ]
            if queries:
                self._send_queries(process, queries, wait_s)
            is_awaited = bool(_without_outcome(asked[:num_awaited]))
            left_s = max(0.0, until_s - time.monotonic()) if is_awaited else 0.0
            reply = self._receive_reply(process, left_s)
            if reply is None:
                break
            crashing |= _apply(reply, asked)
        return crashing

    def _load(self, grammar: CompiledGrammar) -> int:
        """Load a grammar into the process; return its size in bytes.

        Raises EngineError, OverloadedError if it does not fit in memory, or MaskProcessDiedError.
        """
        with self._lock:
            process = self._process
            if process is None:
                self._num_incarnations += 1
                process = self._process = _MaskProcess(self._num_incarnations, *self._connect())
            try:
                process.grammars.settimeout(_LOAD_TIMEOUT_S)
                load = LoadGrammar(grammar.id, grammar.text, _drained(self._ended_grammar_ids))
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

    def _count_memory(self, grammar: CompiledGrammar, num_bytes: int) -> None:
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

    def _process_with(self, grammars: Iterable[CompiledGrammar]) -> _MaskProcess:
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
                    self._load(grammar)
            except (EngineError, OverloadedError, OSError) as error:
                # No process could be started, or it cannot load a grammar that an earlier process
                # could load.
                raise MaskProcessDiedError(str(error)) from error
        raise MaskProcessDiedError(f"The mask process died {_MAX_INCARNATIONS} times in a row.")

    def _send_queries(self, process: _MaskProcess, queries: list[MaskQuery], wait_s: float) -> None:
        """Ask for masks. Raises MaskProcessDiedError."""
        # The process replies early enough for the last masks to be read in time.
        patience_s = min(_PATIENCE_SHARE * wait_s, _MAX_PATIENCE_S)
        sequence_ids, grammar_ids = _drained(self._ended_sequence_ids), self._ended_grammar_ids
        query = StepQuery(queries, sequence_ids, _drained(grammar_ids), patience_s)
        try:
            process.masks.settimeout(_SEND_TIMEOUT_S)
            write_frame(process.masks, msgspec.msgpack.encode(query))
        except BrokenPipeError:
            # Its last reply may say which sequence has ended the process.
            return
        except OSError as error:
            self._forget(process)
            raise _died(error, is_killed=True) from error

    def _receive_reply(self, process: _MaskProcess, wait_s: float) -> MaskReply | None:
        """Return the next reply, or None if there is none within `wait_s`.

        Raises MaskProcessDiedError.
        """
        if not _is_readable(process.masks, wait_s):
            return None
        try:
            process.masks.settimeout(_SEND_TIMEOUT_S)
            reply: MaskReply = read_message(process.masks, MaskReply)
        except (OSError, EOFError, ValueError) as error:
            self._forget(process)
            raise _died(error, is_killed=True) from error
        if reply.is_last:
            self._forget(process)
        return reply

    def _close_orphaned(self) -> None:
        """Close the sockets of dead processes. Called by the thread that queries."""
        for connection in _drained(self._orphaned):
            connection.close()

    def _forget(self, process: _MaskProcess) -> None:
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


def _without_outcome(asked: Sequence[AskedMasks]) -> list[AskedMasks]:
    return [one for one in asked if one.matcher.outcome_after(one.token_ids) is None]


def _apply(reply: MaskReply, asked: Sequence[AskedMasks]) -> set[CompiledGrammar]:
    """Record the masks that were requested; return the grammars that ended the process."""
    matchers: dict[int, MatcherHandle] = {one.matcher.id: one.matcher for one in asked}
    crashing: set[CompiledGrammar] = set()
    for made in reply.masks:
        # Others belong to sequences that have ended.
        if made.sequence_id not in matchers:
            continue
        matcher = matchers[made.sequence_id]
        if made.is_offender and made.finish_reason is None:
            matcher.grammar.has_drafts = False
            continue
        matcher.note_made(made)
        if made.error:
            logger.warning("Ending a sequence with an error: %s.", made.error)
        if made.is_offender:
            crashing.add(matcher.grammar)
    # Other sequences of the grammar may be as slow, and there may be many.
    for one in _without_outcome(asked):
        if one.matcher.grammar in crashing:
            one.matcher.note_failure(one.token_ids, _TOO_COSTLY)
    return crashing


def _is_readable(connection: socket.socket, wait_s: float) -> bool:
    """Wait until there is something to read, or the other end is closed."""
    # Unlike `select`, for any number of open files.
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if wait_s == math.inf else 1e3 * wait_s))


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
