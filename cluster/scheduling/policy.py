"""Who is served first, and who makes room.

Sequences are ranked by priority, then arrival, then index; what waits is also shared out among
tenants, by `fair_queue`. Room is taken from the last in rank of the tenant most served. A sequence
that made room often enough is spared from then on: it starts again only with all the blocks it can
ever need, so that it ends whatever the others do.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from cluster.scheduling.sequence import Sequence

__all__ = [
    "MAX_PREEMPTIONS",
    "SequenceQueue",
    "choose_victim",
    "is_spared",
]

MAX_PREEMPTIONS = 3
_order = attrgetter("order")


class SequenceQueue:
    """Sequences in the order of their rank."""

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

    def insert(self, sequence: Sequence) -> None:
        """Put a sequence where its rank says."""
        insort(self._sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        index = bisect_left(self._sequences, sequence.order, key=_order)
        assert self._sequences[index] is sequence
        del self._sequences[index]


def is_spared(sequence: Sequence) -> bool:
    """Return whether a sequence has made room often enough."""
    return sequence.num_preemptions >= MAX_PREEMPTIONS


def choose_victim(running: SequenceQueue, needy: Sequence) -> Sequence | None:
    """Return the sequence that makes room for `needy`, or None if all behind it are spared."""
    victim: Sequence | None = None
    for sequence in reversed(running):
        if sequence is needy:
            break
        # One whose last token is being sampled makes room by itself.
        if is_spared(sequence) or sequence.length == sequence.max_length:
            continue
        if victim is None or sequence.share.time > victim.share.time:
            victim = sequence
    return victim
