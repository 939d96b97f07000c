"""A queue that is fair among tenants.

Items of one tenant are sorted by `order`. The least served tenant comes first: each has a virtual
clock that advances by cost over weight. A new request advances its tenant's clock to that of the
least served tenant that waits, or of the least served one with an open request if none waits. This
is start-time fair queueing with costs charged as they arise, as in "Fairness in Serving Large
Language Models" (Sheng et al., 2024).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from pagedray.errors import OverloadedError
from pagedray.text import pluralize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Backlog", "FairQueue", "LeastFirst", "Share"]

_order = attrgetter("order")
Member = TypeVar("Member")
# Any: tuples of one kind within one collection.
_Key = tuple[Any, ...]
_MIN_COMPACTED = 64

_WINDOW_S = 0.25
_WEIGHT_OF_NEWS = 0.3
_UNMEASURED_RETRY_S = 1.0
_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0


class _Queueable(Protocol):
    """An item of the queue."""

    @property
    # Any: tuples of one kind within one queue.
    def order(self) -> tuple[Any, ...]:
        """Items of lower order come first."""

    @property
    def share(self) -> Share[Self]:
        """The share of its tenant."""


Item = TypeVar("Item", bound=_Queueable)


class Share(Generic[Item]):
    """One tenant's part of a queue."""

    __slots__ = ("last_charge", "num_open", "num_rows", "tenant", "time", "waiting")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.time = 0.0
        """The tenant's virtual clock: the cost that was served, divided by the weight."""
        self.last_charge = 0
        """Number of charges of the queue at the last charge of this tenant, which orders equal
        clocks.
        """
        self.num_open = 0
        """Requests that have not ended."""
        self.num_rows = 0
        """Rows that its sequences have."""
        self.waiting: list[Item] = []
        """Waiting items, sorted by `order`."""


class FairQueue(Generic[Item]):
    """The waiting items of all tenants; the least served tenant's come first."""

    __slots__ = ("_backlogged", "_idle", "_num_charges", "_num_items", "_open", "_shares")

    def __init__(self) -> None:
        self._shares: dict[str, Share[Item]] = {}
        self._backlogged = LeastFirst[Share[Item]](_turn)
        """Shares with waiting items."""
        self._open = LeastFirst[Share[Item]](_clock)
        """Shares with requests that have not ended."""
        self._idle = LeastFirst[Share[Item]](_clock)
        """All other shares, which were served more than the least served share with requests."""
        self._num_items = 0
        self._num_charges = 0

    def __len__(self) -> int:
        return self._num_items

    def __bool__(self) -> bool:
        return self._num_items > 0

    def __iter__(self) -> Iterator[Item]:
        for share in self._backlogged:
            yield from share.waiting

    @property
    def has_first(self) -> bool:
        """Whether there is an item that is not hidden."""
        return bool(self._backlogged)

    @property
    def first(self) -> Item:
        """The first item that is not hidden, of the least served tenant; see `has_first`."""
        return self._backlogged.first.waiting[0]

    def open_share(self, tenant: str) -> Share[Item]:
        """Return a tenant's share for one request; the caller closes it."""
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = Share(tenant)
        if self._open:
            # A tenant gets no credit for the time in which it had no requests.
            share.time = max(share.time, (self._backlogged or self._open).first.time)
        if not share.num_open:
            self._idle.discard(share)
            self._open.add(share)
        share.num_open += 1
        return share

    def close_share(self, share: Share[Item]) -> None:
        """End a request; tenants without requests are dropped once others have caught up."""
        share.num_open -= 1
        if share.num_open:
            return
        self._open.discard(share)
        self._idle.add(share)
        now = self._open.first.time if self._open else math.inf
        while self._idle and self._idle.first.time <= now:
            dropped = self._idle.first
            self._idle.discard(dropped)
            del self._shares[dropped.tenant]

    def charge(self, share: Share[Item], cost: float) -> None:
        """Advance the clock of a tenant by the cost of the served tokens, over its weight."""
        share.time += cost
        self._num_charges += 1
        share.last_charge = self._num_charges

    def clear(self) -> None:
        """Remove all items and take all rows; the clocks remain."""
        for share in self._shares.values():
            share.waiting.clear()
            share.num_rows = 0
        self._backlogged.clear()
        self._num_items = 0

    def insert(self, item: Item) -> None:
        """Add an item to the share of its tenant, at the place of its `order`."""
        share = item.share
        insort(share.waiting, item, key=_order)
        self._num_items += 1
        if share.waiting[0] is item:
            self._backlogged.add(share)

    def hide_share(self, share: Share[Item]) -> None:
        """Hide the items of a tenant from `first` until another item becomes its first."""
        self._backlogged.discard(share)

    def remove(self, item: Item) -> None:
        """Remove an item, which must be in the queue."""
        share = item.share
        index = bisect_left(share.waiting, item.order, key=_order)
        assert share.waiting[index] is item
        del share.waiting[index]
        self._num_items -= 1
        if not share.waiting:
            self._backlogged.discard(share)


# Any: shares of queues of any item.
def _turn(share: Share[Any]) -> tuple[Any, ...]:
    return (share.time, share.last_charge, *share.waiting[0].order)


def _clock(share: Share[Any]) -> tuple[float]:
    return (share.time,)


class LeastFirst(Generic[Member]):
    """Finds the member with the least key in O(log n), amortized.

    A member's key may grow at any time: it is read again when the member comes first. If it
    shrinks, the member is to be added again.
    """

    __slots__ = ("_entries", "_heap", "_key", "_numbers")

    def __init__(self, key: Callable[[Member], _Key]) -> None:
        self._key = key
        self._entries: dict[Member, tuple[_Key, int, Member]] = {}
        """The valid entries of the heap; their keys are at most their members' keys."""
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
        """Remove a member, if present."""
        self._entries.pop(member, None)

    def clear(self) -> None:
        """Remove all members."""
        self._entries.clear()
        self._heap.clear()


class _Rate:
    """A moving average of a rate per second."""

    __slots__ = ("_count", "per_s")

    def __init__(self) -> None:
        self._count = 0
        self.per_s: float | None = None
        """None before the first window with a backlog."""

    def add(self, count: int) -> None:
        self._count += count

    def end_window(self, elapsed_s: float, *, is_valid: bool) -> None:
        """Start a new window; the old one enters the average if it is valid."""
        found = self._count / elapsed_s
        self._count = 0
        if not is_valid:
            return
        old = found if self.per_s is None else self.per_s
        self.per_s = old + _WEIGHT_OF_NEWS * (found - old)

    def half_of(self, amount: int) -> float:
        """Return the seconds until half of an amount has started."""
        if self.per_s is None:
            return _UNMEASURED_RETRY_S
        wait_s = amount / 2 / self.per_s if self.per_s else _MAX_RETRY_S
        return min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)


class Backlog:
    """Counts the requests that have not started, and rejects requests beyond its limits."""

    __slots__ = (
        "_max_requests",
        "_max_tokens",
        "_num_of_tenants",
        "_request_rate",
        "_token_rate",
        "_was_busy",
        "_window_s",
        "num_requests",
        "num_tokens",
    )

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._request_rate = _Rate()
        self._token_rate = _Rate()
        self._window_s: float | None = None
        self._was_busy = False
        self._num_of_tenants: Counter[str] = Counter()
        self.num_requests = 0
        self.num_tokens = 0
        """Prompt tokens of these requests."""

    def check_room(self, tenant: str, num_tokens: int) -> None:
        """Raise OverloadedError if there is no room for a request of this many prompt tokens.

        A tenant's only request always has room, whatever its length, so that no tenant can lock
        out others. May be called from any thread.
        """
        if not self._num_of_tenants[tenant]:
            return
        if self.num_requests >= self._max_requests:
            raise OverloadedError(
                f"The queue is full: at most {pluralize(self._max_requests, 'request')} may wait.",
                retry_after_s=self._request_rate.half_of(self.num_requests),
            )
        if self.num_tokens + num_tokens > self._max_tokens:
            raise OverloadedError(
                f"The queue is full: {num_tokens} more prompt tokens would exceed the limit of "
                f"{self._max_tokens}.",
                retry_after_s=self._token_rate.half_of(self.num_tokens),
            )

    def add_request(self, tenant: str, num_tokens: int) -> None:
        """Add a request that waits, with its prompt tokens."""
        self._num_of_tenants[tenant] += 1
        self.num_requests += 1
        self.num_tokens += num_tokens

    def start_request(self, tenant: str, num_tokens: int) -> None:
        """Remove a request that started, and count it for the estimated wait of others."""
        self.drop_request(tenant, num_tokens)
        self._request_rate.add(1)
        self._token_rate.add(num_tokens)

    def drop_request(self, tenant: str, num_tokens: int) -> None:
        """Remove a request that ended before it started."""
        self._num_of_tenants[tenant] -= 1
        if not self._num_of_tenants[tenant]:
            del self._num_of_tenants[tenant]
        self.num_requests -= 1
        self.num_tokens -= num_tokens

    def tick(self, now_s: float) -> None:
        """Advance the clock; to be called regularly."""
        if self._window_s is None:
            self._window_s = now_s
        elapsed_s = now_s - self._window_s
        if elapsed_s < _WINDOW_S:
            return
        is_busy = self.num_requests > 0
        for rate in (self._request_rate, self._token_rate):
            rate.end_window(elapsed_s, is_valid=is_busy and self._was_busy)
        self._window_s, self._was_busy = now_s, is_busy
