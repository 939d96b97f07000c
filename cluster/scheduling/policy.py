"""The order of sequences, and the choice of a preemption victim.

Sequences are ordered by priority, arrival and index; waiting ones are also shared out among
tenants, by `fair_queue`. The victim is the last sequence of the most served tenant. A sequence
that was preempted `MAX_PREEMPTIONS` times is spared afterwards: it restarts only with all the
blocks that it can ever need, so that it always finishes.
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
        self._sequences.clear()

    def insert(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.order, key=_order)
        assert self._sequences[index] is sequence
        del self._sequences[index]


def is_spared(sequence: Sequence) -> bool:
    """Return whether a sequence may not be preempted again."""
    return sequence.num_preemptions >= MAX_PREEMPTIONS


def choose_victim(running: SequenceQueue, needy: Sequence) -> Sequence | None:
    """Return the sequence to preempt for `needy`, or None if all behind it are spared."""
    victim: Sequence | None = None
    for sequence in reversed(running):
        if sequence is needy:
            break
        # A sequence whose last token is in flight frees its blocks anyway.
        if is_spared(sequence) or sequence.length == sequence.max_length:
            continue
        if victim is None or sequence.share.time > victim.share.time:
            victim = sequence
    return victim
