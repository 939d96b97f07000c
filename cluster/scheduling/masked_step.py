"""The sequences of a step that sample under masks, and their masks.

Needs no lock of the scheduler: the token of a sequence that ends meanwhile is discarded.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from cluster.scheduling.sequence import FINISHED, ForcedTokens, Sequence, SequenceMasks
from pagedray.batch import StepMasks
from pagedray.request import AskedMasks, FinishReason, Grammar, Matcher

if TYPE_CHECKING:
    from collections.abc import Sequence as AnySequence

__all__ = ["MadeMasks", "MaskedRow", "MaskedStep"]

_Outcome = bytes | FinishReason | None
_MOST_FORCED = 16
"""Tokens that a grammar forces of which the drafter knows."""


class MaskedRow(NamedTuple):
    """A sequence of a step that samples under masks."""

    sequence: Sequence
    draft_ids: AnySequence[int] = ()
    num_free: int = 0
    """Tokens that it samples before the first masked token."""

    @property
    def num_masks(self) -> int:
        """Tokens that it samples under masks."""
        return len(self.draft_ids) + 1 - self.num_free


class MadeMasks(NamedTuple):
    """The masks of a step, and the sequences without a mask."""

    masks: StepMasks | None
    """None if no plan is in flight."""
    ends: list[tuple[Sequence, FinishReason]]
    """Sequences with a grammar that allows no token."""
    late: list[Sequence]
    """Sequences of the step that sample no token, since their masks are not made."""
    deferred: list[Sequence]
    """Sequences of the step that are planned again only once their mask is made."""
    cut: dict[Sequence, int]
    """The number of drafts with masks, of sequences of the step that have more drafts."""


class MaskedStep(NamedTuple):
    """The only step in flight, if any, and its sequences that sample under masks."""

    step: int
    rows: list[MaskedRow]
    """In the order of the plan; empty if no plan is in flight."""
    waiting: list[Sequence]
    """Sequences without a plan in flight that wait for the mask of their next token."""

    @property
    def is_first(self) -> bool:
        """Whether the step computes the prompts of all sequences that sample under masks."""
        return bool(self.rows) and not any(row.sequence.has_sampled for row in self.rows)

    def make_masks(self, wait_s: float) -> MadeMasks:
        """Wait up to `wait_s` for the masks of the step, and request masks of waiting sequences."""
        # The previous step may have ended a sequence; its token of this step is discarded.
        rows = [row for row in self.rows if row.sequence.state is not FINISHED]
        # A deferred sequence that was preempted may be in the plan before its mask is made.
        awaited = [row for row in rows if not row.sequence.lacks_mask]
        others = [row for row in rows if row.sequence.lacks_mask]
        others += [MaskedRow(one) for one in self.waiting]
        outcomes = self._outcomes(awaited, others, wait_s)
        for sequence in self.waiting:
            _masks(sequence).is_made = isinstance(outcomes[sequence], bytes)
        for row in rows:
            _masks(row.sequence).is_made = False
        words = [_words(row, outcomes.get(row.sequence, FinishReason.ABORT)) for row in self.rows]
        places = accumulate((row.num_masks for row in self.rows), initial=0)
        released = [
            (place, row.sequence)
            for place, row in zip(places, self.rows, strict=False)
            if isinstance(outcomes.get(row.sequence), bytes) and _matcher(row.sequence).is_free
        ]
        for _, sequence in released:
            sequence.masks = None
        num_sampled = {row.sequence: _num_sampled(row, outcomes[row.sequence]) for row in rows}
        return MadeMasks(
            StepMasks(self.step, b"".join(words), [place for place, _ in released])
            if self.rows
            else None,
            [(one, end) for one, end in outcomes.items() if isinstance(end, FinishReason)],
            [one for one, number in num_sampled.items() if not number],
            [
                row.sequence
                for row in rows
                if row.sequence.masks is not None and row.sequence.masks.num_deferred
            ],
            {
                row.sequence: number - 1
                for row in rows
                if 0 < (number := num_sampled[row.sequence]) <= len(row.draft_ids)
            },
        )

    def _outcomes(
        self, awaited: AnySequence[MaskedRow], others: AnySequence[MaskedRow], wait_s: float
    ) -> dict[Sequence, _Outcome]:
        """Return the masks, or how it ends, of each sequence, and note which are late or costly."""
        rows = [*awaited, *others]
        if not rows:
            return {}
        asked = [_asked(row) for row in rows]
        found = _grammar(rows[0].sequence).masks(asked, num_awaited=len(awaited), wait_s=wait_s)
        outcomes = {row.sequence: outcome for row, outcome in zip(rows, found, strict=True)}
        for row in rows:
            _note_forced(row)
        for sequence in (row.sequence for row in awaited):
            if not _masks(sequence).is_made:
                _note(sequence, is_late=outcomes[sequence] is None or _matcher(sequence).is_costly)
        for sequence in (row.sequence for row in others):
            # It is not waited for, so it is not late.
            if outcomes[sequence] is not None:
                _note(sequence, is_late=_matcher(sequence).is_costly)
        return outcomes


def _asked(row: MaskedRow) -> AskedMasks:
    sequence = row.sequence
    num_forced = 0 if sequence.drafts is None else _MOST_FORCED
    return AskedMasks(_matcher(sequence), sequence.token_ids, row.draft_ids, num_forced)


def _note_forced(row: MaskedRow) -> None:
    """Let the drafter know which tokens follow the tokens and drafts of a sequence."""
    forced_ids = _matcher(row.sequence).forced_ids
    if forced_ids:
        place = len(row.sequence.token_ids) + len(row.draft_ids)
        _masks(row.sequence).forced = ForcedTokens(place, [*forced_ids])


def _note(sequence: Sequence, *, is_late: bool) -> None:
    """Note whether a step should wait for the next mask of a sequence."""
    _masks(sequence).note_made(is_late=is_late)
    if is_late:
        sequence.unchecked_until = 0


def _words(row: MaskedRow, outcome: _Outcome) -> bytes:
    """Return the masks of a row: anything for an ended sequence, nothing for masks not made."""
    num_bytes = _grammar(row.sequence).num_mask_bytes
    if isinstance(outcome, FinishReason):
        return b"\xff" * num_bytes * row.num_masks
    made = (outcome or b"")[num_bytes * row.num_free :]
    return made.ljust(num_bytes * row.num_masks, b"\x00")


def _num_sampled(row: MaskedRow, outcome: _Outcome) -> int:
    """Return how many tokens a row samples: the tokens before the first token without a mask."""
    if isinstance(outcome, FinishReason):
        return len(row.draft_ids) + 1
    return max(len(outcome or b"") // _grammar(row.sequence).num_mask_bytes, row.num_free)


def _grammar(sequence: Sequence) -> Grammar:
    grammar = sequence.active.request.grammar
    assert grammar is not None
    return grammar


def _masks(sequence: Sequence) -> SequenceMasks:
    assert sequence.masks is not None
    return sequence.masks


def _matcher(sequence: Sequence) -> Matcher:
    masks = _masks(sequence)
    if masks.matcher is None:
        masks.matcher = _grammar(sequence).matcher(sequence.active.request)
    return masks.matcher
