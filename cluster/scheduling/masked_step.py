"""The sequences of a step that sample under masks, and their masks.

Needs no lock of the scheduler: the token of a sequence that ends meanwhile is discarded.
"""

from collections.abc import Sequence as AnySequence
from typing import NamedTuple

from cluster.scheduling.sequence import FINISHED, Sequence, SequenceMasks
from pagedray.batch import StepMasks
from pagedray.request import FinishReason, Grammar, Matcher

__all__ = ["MadeMasks", "MaskedStep"]

_Outcome = bytes | FinishReason | None


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


class MaskedStep(NamedTuple):
    """The only step in flight, if any, and its sequences that sample under masks."""

    step: int
    sequences: list[Sequence]
    """Sequences in the order of the plan; empty if no plan is in flight."""
    waiting: list[Sequence]
    """Sequences without a plan in flight that wait for the mask of their next token."""

    @property
    def is_first(self) -> bool:
        """Whether the step computes the prompts of all sequences that sample under masks."""
        return bool(self.sequences) and not any(one.has_sampled for one in self.sequences)

    def make_masks(self, wait_s: float) -> MadeMasks:
        """Wait up to `wait_s` for the masks of the step, and request masks of waiting sequences."""
        # The previous step may have ended a sequence; its token of this step is discarded.
        rows = [one for one in self.sequences if one.state is not FINISHED]
        # A deferred sequence that was preempted may be in the plan before its mask is made.
        awaited = [one for one in rows if not one.lacks_mask]
        others = [one for one in rows if one.lacks_mask]
        outcomes = self._outcomes(awaited, others + self.waiting, wait_s)
        for sequence in self.waiting:
            _masks(sequence).is_made = isinstance(outcomes[sequence], bytes)
        for sequence in rows:
            _masks(sequence).is_made = False
        words = [_words(one, outcomes) for one in self.sequences]
        released = [
            index
            for index, one in enumerate(self.sequences)
            if isinstance(outcomes.get(one), bytes) and _matcher(one).is_free
        ]
        for index in released:
            self.sequences[index].masks = None
        return MadeMasks(
            StepMasks(self.step, b"".join(words), released) if self.sequences else None,
            [(one, end) for one, end in outcomes.items() if isinstance(end, FinishReason)],
            [one for one in rows if outcomes[one] is None],
            [one for one in rows if one.masks is not None and one.masks.num_deferred],
        )

    def _outcomes(
        self, awaited: AnySequence[Sequence], others: AnySequence[Sequence], wait_s: float
    ) -> dict[Sequence, _Outcome]:
        """Return the mask, or how it ends, of each sequence, and note which are late or costly."""
        sequences = [*awaited, *others]
        if not sequences:
            return {}
        asked = [(_matcher(one), one.token_ids) for one in sequences]
        found = _grammar(sequences[0]).masks(asked, num_awaited=len(awaited), wait_s=wait_s)
        outcomes = dict(zip(sequences, found, strict=True))
        for sequence in awaited:
            if not _masks(sequence).is_made:
                _note(sequence, is_late=outcomes[sequence] is None or _matcher(sequence).is_costly)
        for sequence in others:
            # It is not waited for, so it is not late.
            if outcomes[sequence] is not None:
                _note(sequence, is_late=_matcher(sequence).is_costly)
        return outcomes


def _note(sequence: Sequence, *, is_late: bool) -> None:
    """Note whether a step should wait for the next mask of a sequence."""
    _masks(sequence).note_made(is_late=is_late)
    if is_late:
        sequence.unchecked_until = 0


def _words(sequence: Sequence, outcomes: dict[Sequence, _Outcome]) -> bytes:
    """Return the mask of a row: anything for an ended sequence, nothing for a late mask."""
    outcome = outcomes.get(sequence, FinishReason.ABORT)
    if isinstance(outcome, bytes):
        return outcome
    word = b"\x00" if outcome is None else b"\xff"
    return word * _grammar(sequence).num_mask_bytes


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
