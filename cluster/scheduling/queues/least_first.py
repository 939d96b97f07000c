"""Members in the order of keys that only grow, such as clocks."""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Any, Generic, TypeVar

__all__ = ["LeastFirst"]

Member = TypeVar("Member")
# Any: tuples of one kind within one collection.
_Key = tuple[Any, ...]

_MIN_COMPACTED = 64


class LeastFirst(Generic[Member]):
    """Finds the member with the least key in O(log n), amortized.

    A member's key may grow at any time: it is read again when the member comes first. If it
    shrinks, the member is to be added again.
    """

    __slots__ = ("_entries", "_heap", "_key", "_numbers")

    def __init__(self, key: Callable[[Member], _Key]) -> None:
        self._key = key
        self._entries: dict[Member, tuple[_Key, int, Member]] = {}
        """The valid entries of the heap, whose keys are at most those of their members."""
        self._heap: list[tuple[_Key, int, Member]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._entries)

    @property
    def first(self) -> Member:
        """The member with the least key."""
        while True:
            entry = self._heap[0]
            known, number, member = entry
            if self._entries.get(member) is not entry:
                heappop(self._heap)
                continue
            key = self._key(member)
            if key == known:
                return member
            entry = self._entries[member] = (key, number, member)
            heapreplace(self._heap, entry)

    def add(self, member: Member) -> None:
        """Add a member, or note that its key has shrunk."""
        entry = self._entries[member] = (self._key(member), next(self._numbers), member)
        heappush(self._heap, entry)
        # Most of many entries may be invalid, and not reach the front.
        if len(self._heap) > 2 * len(self._entries) + _MIN_COMPACTED:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def discard(self, member: Member) -> None:
        """Remove a member, if it is one."""
        self._entries.pop(member, None)

    def clear(self) -> None:
        """Remove all members."""
        self._entries.clear()
        self._heap.clear()
