"""A plan that was sent, and whose output has not arrived."""

import msgspec

from cluster.scheduling.sequence import Sequence
from pagedray.batch import StepPlan

__all__ = ["Flight"]


class Flight(msgspec.Struct, frozen=True):
    """A plan without an output yet."""

    plan: StepPlan
    sampled: list[Sequence]
    prefilled: list[Sequence]
    """Sequences that compute known tokens, whether they sample or not."""
    late: list[Sequence]
    """Sampled sequences whose masks were not made in time; they sample no token."""
    described: dict[int, Sequence]
    """Sequences by row, of whose prompts the step computes log-probabilities."""
    masked: list[Sequence]
    """Sampled sequences whose token is masked."""
