"""Sequences in the order of priority, arrival and index."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from cluster.scheduling.sequence import Sequence

__all__ = ["SequenceQueue"]

_order = attrgetter("order")


class SequenceQueue:
    """Sequences sorted by `order`."""

    __slots__ = ("_sequences",)

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    def clear(self) -> None:
        """Remove all sequences."""
        self._sequences.clear()

    def insert(self, sequence: Sequence) -> None:
        """Add a sequence at the place of its `order`."""
        insort(self._sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, which must be in the queue."""
        index = bisect_left(self._sequences, sequence.order, key=_order)
        assert self._sequences[index] is sequence
        del self._sequences[index]
