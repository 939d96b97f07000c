"""Waiting sequences that are passed in one step; they are out of the queue until its end."""

from cluster.scheduling.queues.fair_queue import FairQueue, Share
from cluster.scheduling.sequence import Sequence

__all__ = ["PassedItems"]

_MAX_PASSED = 8
_MAX_PASSED_OF_TENANT = 4
"""More than one, so that a large prompt does not stop its own tenant either."""


class PassedItems:
    """Takes sequences from a fair queue, to find others behind them, and puts them back."""

    __slots__ = ("_counts", "_items", "_queue")

    def __init__(self, queue: FairQueue[Sequence]) -> None:
        self._queue = queue
        self._items: list[Sequence] = []
        self._counts: dict[Share[Sequence], int] = {}

    @property
    def are_any(self) -> bool:
        """Whether a sequence was passed and not yet put back."""
        return bool(self._items)

    @property
    def is_full(self) -> bool:
        """Whether no more may be passed, which bounds the time of a step."""
        return len(self._items) >= _MAX_PASSED

    def pass_item(self, sequence: Sequence) -> None:
        """Take a sequence from the queue; the fourth of a tenant hides all others of it."""
        self._items.append(sequence)
        count = self._counts[sequence.share] = self._counts.get(sequence.share, 0) + 1
        self._queue.remove(sequence)
        if count == _MAX_PASSED_OF_TENANT:
            self._queue.hide_share(sequence.share)

    def put_back(self) -> None:
        """Put all passed sequences back into the queue."""
        for sequence in self._items:
            self._queue.insert(sequence)
