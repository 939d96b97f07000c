"""A queue that is fair among tenants.

Items of one tenant are sorted by `order`. The least served tenant comes first: each has a virtual
clock that advances by cost over weight, and a tenant that becomes backlogged starts no earlier
than the others. This is start-time fair queueing with costs charged as they arise, as in
"Fairness in Serving Large Language Models" (Sheng et al., 2024).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Generic, Protocol, Self, TypeVar

__all__ = ["FairQueue", "Share"]

_order = attrgetter("order")


class _Queueable(Protocol):
    """An item of the queue."""

    @property
    # Any: tuples of one kind within one queue.
    def order(self) -> tuple[Any, ...]:
        """Lower ones come first."""

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
        """Its virtual clock: served cost over weight."""
        self.num_open = 0
        """Requests that have not ended."""
        self.waiting: list[Item] = []
        """Waiting items, sorted by `order`."""


class FairQueue(Generic[Item]):
    """The waiting items of all tenants; the least served tenant's come first."""

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
        """Tenants with a clock."""
        return len(self._shares)

    @property
    def first(self) -> Item:
        if len(self._backlogged) == 1:
            return self._backlogged[0].waiting[0]
        return min(self._backlogged, key=_turn).waiting[0]

    def open_share(self, tenant: str) -> Share[Item]:
        """Return a tenant's share for one request; the caller closes it."""
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = Share(tenant)
            # A new tenant has neither debt nor credit.
            share.time = self._now()
        share.num_open += 1
        return share

    def close_share(self, share: Share[Item]) -> None:
        """End a request; tenants without requests are dropped once others have caught up."""
        share.num_open -= 1
        now = self._now()
        for tenant, idle in list(self._shares.items()) if share.num_open == 0 else ():
            if idle.num_open == 0 and idle.time <= now and idle is not self._last:
                del self._shares[tenant]

    def charge(self, share: Share[Item], cost: float) -> None:
        """Advance the clock of a tenant by the cost of what was served, over its weight."""
        share.time += cost
        self._last = share

    def clear(self) -> None:
        """Remove all items; the clocks remain."""
        for share in self._backlogged:
            share.waiting.clear()
        self._backlogged.clear()

    def insert(self, item: Item) -> None:
        share = item.share
        if not share.waiting:
            share.time = max(share.time, self._now())
            self._backlogged.append(share)
        insort(share.waiting, item, key=_order)

    def remove(self, item: Item) -> None:
        waiting = item.share.waiting
        index = bisect_left(waiting, item.order, key=_order)
        assert waiting[index] is item
        del waiting[index]
        if not waiting:
            self._backlogged.remove(item.share)

    def _now(self) -> float:
        """Return the clock of the least served backlogged tenant, or else of the last served."""
        if self._backlogged:
            return min(share.time for share in self._backlogged)
        return 0.0 if self._last is None else self._last.time


# Any: shares of queues of any item.
def _turn(share: Share[Any]) -> tuple[Any, ...]:
    return (share.time, *share.waiting[0].order)
