"""The replica's client of the process that makes masks.

Its state can be replayed to another process, so that its death ends only the sequence that caused
it and sequences of the same grammar.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from itertools import count
from typing import TYPE_CHECKING

from cluster.structured.processes.compiled_grammar import CompiledGrammar, MatcherHandle
from cluster.structured.processes.mask_connection import MaskConnection, MaskProcessDiedError
from pagedray.errors import EngineError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from cluster.structured.processes.compiled_grammar import Outcome
    from cluster.structured.processes.messages import GrammarText, MaskReply
    from pagedray.request import Request

__all__ = ["MaskClient"]

logger = logging.getLogger(__name__)

_COSTLY_SHARE = 0.5
"""A mask with more CPU time than this share of the time that a caller waits is not worth waiting
for."""
_TOO_COSTLY = "its masks take too much time or memory"
"""The reason for the end of sequences with a structure that has ended a process, or would."""

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
        """Number of bytes of a mask."""
        self._connection = MaskConnection(connect, max_tenant_bytes=max_tenant_bytes)
        self._step_s = step_s
        self._alone_s = alone_s
        self._ids = count()
        self._lock = threading.Lock()
        """Held by the thread that queries."""

    def load_grammar(self, text: GrammarText, *, tenant: str = "") -> tuple[CompiledGrammar, int]:
        """Return a compiled grammar of a tenant and its size in bytes.

        Raises EngineError, OverloadedError if it does not fit in memory, or InvalidRequestError if
        it never does.
        """
        note_end = self._connection.ended_grammar_ids.append
        grammar = CompiledGrammar(self, next(self._ids), text, tenant, note_end)
        try:
            num_bytes = self._connection.load_grammar(grammar)
        except MaskProcessDiedError:
            # Another grammar may have been the cause.
            try:
                num_bytes = self._connection.load_grammar(grammar)
            except MaskProcessDiedError as error:
                raise EngineError(f"Failed to load a compiled grammar. {error}") from error
        self._connection.count_memory(grammar, num_bytes)
        return grammar, num_bytes

    def matcher(self, grammar: CompiledGrammar, request: Request) -> MatcherHandle:
        """Return a matcher at the start of a completion of the request."""
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
            except MaskProcessDiedError as error:
                logger.warning("Querying each sequence alone. %s", error)
                # Only the cause ends, with the other sequences of its grammar: each of them would
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
        """Wait for the outcome of a query; add its grammar to `crashing` if that ends a process."""
        matcher, token_ids = asked
        if matcher.outcome_after(token_ids) is not None:
            return
        if matcher.grammar in crashing:
            matcher.note_failure(token_ids, _TOO_COSTLY)
            return
        try:
            crashing |= self._query_all([asked], 1, math.inf, self._alone_s)
        except MaskProcessDiedError as error:
            logger.warning("Ending all sequences of a grammar with an error. %s", error)
            crashing.add(matcher.grammar)
            matcher.note_failure(token_ids, _TOO_COSTLY if error.is_killed else "")

    def _query_all(
        self, asked: Sequence[_Asked], num_awaited: int, wait_s: float, limit_s: float
    ) -> set[CompiledGrammar]:
        """Query masks and wait for the first masks; return the grammars that ended a process.

        Raises MaskProcessDiedError.
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
    """Record the masks that were requested; return the grammars that ended the process."""
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
