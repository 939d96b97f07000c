"""The masked sequences of a step whose tokens may be limited, and the masks that they get.

It may be asked without the scheduler's lock: a sequence that is ended meanwhile gets a mask, and
the token that is sampled under it is discarded.
"""

from typing import NamedTuple

from cluster.scheduling.sequence import Sequence, SequenceState
from pagedray.batch import StepMasks
from pagedray.request import FinishReason

__all__ = ["MaskedStep"]


class MaskedStep(NamedTuple):
    """A step in flight that samples under masks; no earlier step is in flight."""

    step: int
    sequences: list[Sequence]
    """In the order of the plan."""

    def masks(self) -> tuple[StepMasks, list[tuple[Sequence, FinishReason]]]:
        """Return the masks, and the sequences for which no token is left to sample."""
        rows: list[bytes] = []
        ends: list[tuple[Sequence, FinishReason]] = []
        for sequence in self.sequences:
            row = _mask(sequence)
            if isinstance(row, FinishReason):
                ends.append((sequence, row))
                row = _everything(sequence)
            rows.append(row)
        return StepMasks(self.step, b"".join(rows)), ends


def _mask(sequence: Sequence) -> bytes | FinishReason:
    # The step before may have ended it; its token of this step is discarded.
    if sequence.state is SequenceState.FINISHED:
        return _everything(sequence)
    if sequence.matcher is None:
        request = sequence.active.request
        assert request.grammar is not None
        sequence.matcher = request.grammar.matcher(request)
    return sequence.matcher.mask(sequence.token_ids)


def _everything(sequence: Sequence) -> bytes:
    grammar = sequence.active.request.grammar
    assert grammar is not None
    return b"\xff" * grammar.num_mask_bytes
