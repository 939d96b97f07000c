"""The order of decodes in a plan: those of the longest sequences come first.

A GPU starts the programs of a kernel in the order of a batch. Those of long sequences would run on
alone if they began last (longest processing time first; Graham, 1969).
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.scheduling.planning.plan_draft import PlanDraft
    from cluster.scheduling.sequence import Sequence

__all__ = ["DecodeOrder"]


class DecodeOrder:
    """Sorts the decodes of one plan after another. Equal ones keep their order."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._order: tuple[int, ...] = ()

    def sort(self, draft: PlanDraft) -> None:
        """Put the longest sequences of a draft first."""
        sequences, positions = draft.decodes, draft.decode_positions
        # Sequences that decode together grow together.
        if sequences != self._sequences:
            self._sequences = sequences
            indices = range(len(positions))
            self._order = tuple(sorted(indices, key=positions.__getitem__, reverse=True))
            if self._order == tuple(indices):
                self._order = ()
        if self._order:
            pick = itemgetter(*self._order)
            draft.decodes, draft.decode_positions = list(pick(sequences)), list(pick(positions))
