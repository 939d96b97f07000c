"""The replica's client of the process that makes masks.

Its state can be replayed to another process, so that its death ends only the sequence that caused
it and those of the same grammar.
"""

from __future__ import annotations

import logging
import threading
from itertools import count
from typing import TYPE_CHECKING

from cluster.structured.processes.compiled_grammar import CompiledGrammar, MatcherHandle
from cluster.structured.processes.mask_batch import LATE_MASK_S
from cluster.structured.processes.mask_connection import MaskConnection, MaskProcessDiedError
from cluster.structured.processes.sequence_matcher import allowed_cpu_s
from pagedray.errors import EngineError
from pagedray.request import FinishReason

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from cluster.structured.processes.compiled_grammar import Outcome
    from cluster.structured.processes.messages import StepReply
    from pagedray.request import Request

__all__ = ["MaskClient"]

logger = logging.getLogger(__name__)

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
        self._connection = MaskConnection(connect, max_tenant_bytes=max_tenant_bytes)
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
        except MaskProcessDiedError:
            # Another grammar may have been the cause.
            try:
                num_bytes = self._connection.load_grammar(grammar)
            except MaskProcessDiedError as error:
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
            except MaskProcessDiedError as error:
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
        grammar = asked[0].grammar
        if grammar in crashing:
            return FinishReason.ERROR
        outcomes: dict[int, Outcome] = {}
        try:
            crashing |= self._query_all({0: asked}, outcomes, self._alone_s)
        except MaskProcessDiedError as error:
            logger.warning("Ending all sequences of a grammar with an error. %s", error)
            crashing.add(grammar)
            return FinishReason.ERROR
        return outcomes[0]

    def _query_all(
        self, asked: dict[int, _Asked], outcomes: dict[int, Outcome], limit_s: float
    ) -> set[CompiledGrammar]:
        """Query until each row has an outcome; return the grammars that ended a process.

        Raises MaskProcessDiedError.
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
            outcomes |= {
                row: FinishReason.ERROR for row in left if asked[row][0].grammar in crashing
            }
            asked = {row: asked[row] for row in left if asked[row][0].grammar not in crashing}
            for row in asked:
                del outcomes[row]
        return crashing

    def _query(self, asked: Sequence[_Asked], limit_s: float) -> StepReply:
        process = self._connection.process_with({matcher.grammar for matcher, _ in asked})
        queries = [matcher.query(token_ids, process.incarnation) for matcher, token_ids in asked]
        limit_s += sum(LATE_MASK_S + allowed_cpu_s(query) for query in queries)
        reply = self._connection.exchange(process, queries, limit_s)
        for (matcher, _), cpu_s in zip(asked, reply.cpu_s, strict=True):
            matcher.note_cpu_time(cpu_s)
        for error in reply.errors:
            logger.warning("Ending a sequence with an error: %s.", error)
        return reply
