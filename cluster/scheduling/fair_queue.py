"""Whose turn it is: what waits, in the order that is fair among tenants.

Inside a tenant the lowest rank comes first. Among tenants the least served one comes first: each
has a clock, which runs by what it was served over its weight, and the clock of one that comes to
wait is never behind those that wait already. That is start-time fair queueing, with costs charged
as they arise, as in "Fairness in Serving Large Language Models" (Sheng et al., 2024). A tenant
alone is served by rank and nothing else.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Generic, Protocol, Self, TypeVar

__all__ = ["FairQueue", "Share"]

_order = attrgetter("order")


class _Queueable(Protocol):
    """What waits."""

    @property
    # Any: tuples of one kind within one queue.
    def order(self) -> tuple[Any, ...]:
        """The lower comes first."""

    @property
    def share(self) -> "Share[Self]":
        """The share of its tenant."""


Item = TypeVar("Item", bound=_Queueable)


class Share(Generic[Item]):
    """One tenant's part of a queue."""

    __slots__ = ("num_open", "tenant", "time", "waiting")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.time = 0.0
        """What it was served, over its weight."""
        self.num_open = 0
        """Requests that have not ended."""
        self.waiting: list[Item] = []
        """What waits, by rank."""


class FairQueue(Generic[Item]):
    """What waits of all tenants; the first is that of the tenant least served."""

    __slots__ = ("_backlogged", "_last", "_shares")

    def __init__(self) -> None:
        self._shares: dict[str, Share[Item]] = {}
        self._backlogged: list[Share[Item]] = []
        self._last: Share[Item] | None = None

    def __len__(self) -> int:
        return sum(len(share.waiting) for share in self._backlogged)

    def __bool__(self) -> bool:
        return bool(self._backlogged)

    def __iter__(self) -> Iterator[Item]:
        for share in self._backlogged:
            yield from share.waiting

    @property
    def num_shares(self) -> int:
        """Tenants whose service is remembered."""
        return len(self._shares)

    @property
    def first(self) -> Item:
        """Whose turn it is."""
        if len(self._backlogged) == 1:
            return self._backlogged[0].waiting[0]
        return min(self._backlogged, key=_turn).waiting[0]

    def open_share(self, tenant: str) -> Share[Item]:
        """Return a tenant's share, for a request to be closed in the end."""
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = Share(tenant)
            # One that comes anew owes nothing, and has saved nothing.
            share.time = self._now()
        share.num_open += 1
        return share

    def close_share(self, share: Share[Item]) -> None:
        """End a request; a tenant without one is forgotten once it owes nothing."""
        share.num_open -= 1
        now = self._now()
        for tenant, idle in list(self._shares.items()) if share.num_open == 0 else ():
            if idle.num_open == 0 and idle.time <= now and idle is not self._last:
                del self._shares[tenant]

    def charge(self, share: Share[Item], cost: float) -> None:
        """Note that a tenant whose turn it was is served, at a cost over its weight."""
        share.time += cost
        self._last = share

    def insert(self, item: Item) -> None:
        """Put an item where its rank says."""
        share = item.share
        if not share.waiting:
            share.time = max(share.time, self._now())
            self._backlogged.append(share)
        insort(share.waiting, item, key=_order)

    def remove(self, item: Item) -> None:
        """Take an item out."""
        waiting = item.share.waiting
        index = bisect_left(waiting, item.order, key=_order)
        assert waiting[index] is item
        del waiting[index]
        if not waiting:
            self._backlogged.remove(item.share)

    def _now(self) -> float:
        """Return the time of the least served tenant that waits, or else of the last one served."""
        if self._backlogged:
            return min(share.time for share in self._backlogged)
        return 0.0 if self._last is None else self._last.time


# Any: shares of queues of any item.
def _turn(share: Share[Any]) -> tuple[Any, ...]:
    return (share.time, *share.waiting[0].order)
