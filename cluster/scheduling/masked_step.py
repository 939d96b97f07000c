"""The sequences of a step that sample under masks, and their masks.

Needs no lock of the scheduler: the token of a sequence that ends meanwhile is discarded.
"""

from itertools import compress
from typing import NamedTuple

from cluster.scheduling.sequence import Sequence, SequenceState
from pagedray.batch import StepMasks
from pagedray.request import FinishReason, Grammar, Matcher

__all__ = ["MaskedStep"]


class MaskedStep(NamedTuple):
    """A step in flight that samples under masks; no earlier step is in flight."""

    step: int
    sequences: list[Sequence]
    """In the order of the plan."""

    def make_masks(self) -> tuple[StepMasks, list[tuple[Sequence, FinishReason]]]:
        """Return the masks, and the sequences whose grammar allows no token."""
        # The previous step may have ended a sequence; its token of this step is discarded.
        are_followed = [s.state is not SequenceState.FINISHED for s in self.sequences]
        asked = [(_matcher(s), s.token_ids) for s in compress(self.sequences, are_followed)]
        found = iter(_grammar(self.sequences[0]).masks(asked))
        rows: list[bytes] = []
        ends: list[tuple[Sequence, FinishReason]] = []
        for sequence, is_followed in zip(self.sequences, are_followed, strict=True):
            row = next(found) if is_followed else None
            if isinstance(row, FinishReason):
                ends.append((sequence, row))
                row = None
            rows.append(b"\xff" * _grammar(sequence).num_mask_bytes if row is None else row)
        return StepMasks(self.step, b"".join(rows)), ends


def _grammar(sequence: Sequence) -> Grammar:
    grammar = sequence.active.request.grammar
    assert grammar is not None
    return grammar


def _matcher(sequence: Sequence) -> Matcher:
    if sequence.matcher is None:
        sequence.matcher = _grammar(sequence).matcher(sequence.active.request)
    return sequence.matcher
