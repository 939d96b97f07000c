"""Compiled grammars and matchers, as the replica holds them for the process that makes masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from cluster.structured.processes.messages import MaskQuery, MatcherStart
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagedray.request import Request

__all__ = ["CompiledGrammar", "MaskSource", "MatcherHandle", "Outcome"]

Outcome = bytes | FinishReason
"""A mask, or how its sequence ends."""


class MaskSource(Protocol):
    """The client that makes the masks of grammars."""

    num_mask_bytes: int

    def matcher(self, grammar: CompiledGrammar, request: Request) -> MatcherHandle: ...
    def masks(self, asked: Sequence[tuple[MatcherHandle, Sequence[int]]]) -> list[Outcome]: ...


class CompiledGrammar:
    """A compiled structure, which any number of sequences may follow."""

    def __init__(
        self,
        source: MaskSource,
        grammar_id: int,
        text: bytes,
        tenant: str,
        note_end: Callable[[int], None],
    ) -> None:
        self.id = grammar_id
        self.text = text
        self.tenant = tenant
        self.num_bytes = 0
        """Its size in the mask process, once it is loaded."""
        self.incarnation = 0
        """The incarnation of the mask process that it was last loaded into."""
        self._source = source
        self._note_end = note_end

    def __del__(self) -> None:
        self._note_end(self.id)

    @property
    def num_mask_bytes(self) -> int:
        return self._source.num_mask_bytes

    def matcher(self, request: Request) -> MatcherHandle:
        """Return a matcher at the start of a continuation of the request."""
        return self._source.matcher(self, request)

    def masks(self, asked: Sequence[tuple[MatcherHandle, Sequence[int]]]) -> list[Outcome]:
        """Return the masks of matchers, of this or other grammars; see `MaskClient.masks`."""
        return self._source.masks(asked)


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
        self.grammar = grammar
        self.error = ""
        """Why the structure ended the sequence with an error, if it did."""
        self._id = sequence_id
        self._note_end = note_end
        self._start = MatcherStart(
            grammar.id,
            sampling.min_tokens,
            sampling.ignore_eos,
            request.eos_token_ids,
            tuple(sampling.stop_token_ids),
            tenant=grammar.tenant,
        )
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_sent = self._num_prompt_tokens
        self._incarnation = 0
        self._cpu_s = 0.0

    def __del__(self) -> None:
        self._note_end(self._id)

    def note_cpu_time(self, cpu_s: float) -> None:
        """Record the CPU time that the sequence has taken, or 0 if it is unknown."""
        self._cpu_s = max(self._cpu_s, cpu_s)

    def query(self, token_ids: Sequence[int], incarnation: int) -> MaskQuery:
        """Return the query for the next mask; another incarnation gets all generated tokens."""
        start = None
        if incarnation != self._incarnation:
            self._incarnation, self._num_sent = incarnation, self._num_prompt_tokens
            start = replace(self._start, cpu_s=self._cpu_s)
        added = list(token_ids[self._num_sent :])
        self._num_sent = len(token_ids)
        return MaskQuery(self._id, added, start)
