"""Compiled grammars and matchers, as the replica holds them for the process that makes masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from cluster.structured.processes.messages import MadeMask, MaskQuery, MatcherStart
from cluster.structured.processes.sequence_matcher import REJECTED_TOKEN
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cluster.structured.processes.messages import GrammarText
    from pagedray.request import Request

__all__ = ["CompiledGrammar", "MaskSource", "MatcherHandle", "Outcome"]

Outcome = bytes | FinishReason
"""A mask, or how its sequence ends."""


class MaskSource(Protocol):
    """The client that makes the masks of grammars."""

    num_mask_bytes: int

    def matcher(self, grammar: CompiledGrammar, request: Request) -> MatcherHandle: ...
    def masks(
        self,
        asked: Sequence[tuple[MatcherHandle, Sequence[int]]],
        *,
        num_awaited: int,
        wait_s: float,
    ) -> list[Outcome | None]: ...


class CompiledGrammar:
    """A compiled structure, which any number of sequences may follow."""

    def __init__(
        self,
        source: MaskSource,
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
        self,
        asked: Sequence[tuple[MatcherHandle, Sequence[int]]],
        *,
        num_awaited: int,
        wait_s: float,
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
            tenant=grammar.tenant,
            reasoning_budget=sampling.thinking_token_budget,
        )
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_sent = self._num_prompt_tokens
        self._incarnation = 0
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

    def is_pending(self, incarnation: int) -> bool:
        """Return whether this incarnation of the process makes its mask."""
        return self._outcome is None and self._incarnation == incarnation

    def query(self, token_ids: Sequence[int], incarnation: int, *, costly_s: float) -> MaskQuery:
        """Return the query for the next mask; another incarnation gets all generated tokens.

        The mask is costly if it takes more than `costly_s` of CPU time.
        """
        start = None
        if incarnation != self._incarnation:
            self._incarnation, self._num_sent = incarnation, self._num_prompt_tokens
            start = replace(self._start, cpu_s=self._cpu_s)
        added = list(token_ids[self._num_sent :])
        self._num_sent = len(token_ids)
        self._outcome = None
        self._costly_s = costly_s
        return MaskQuery(self.id, added, start)

    def note_made(self, made: MadeMask) -> None:
        """Record the reply to the query."""
        # Both are 0 for a mask that ended its process.
        self._cpu_s = max(self._cpu_s, made.cpu_s)
        self._mask_cpu_s = made.mask_cpu_s
        self._outcome = made.finish_reason or made.words
        self.is_free = made.is_free
        if made.error != REJECTED_TOKEN:
            self.error = made.error

    def note_failure(self, token_ids: Sequence[int], error: str) -> None:
        """End the sequence with an error, empty for a defect, although there was no reply."""
        self.error = error
        self._num_sent = len(token_ids)
        self._outcome = FinishReason.ERROR
