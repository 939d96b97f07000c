"""The fair queue beside one that walks through all tenants at every question."""

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given, settings

from cluster.scheduling.fair_queue import FairQueue, Share


@dataclass(eq=False)
class Item:
    order: tuple[int, ...]
    share: "Share[Item]"
    cost: int


class PlainQueue:
    """What a queue should answer, found by walking through all tenants."""

    def __init__(self) -> None:
        self.clocks: dict[str, float] = {}
        self.num_charges = 0
        self.last_charges: dict[str, int] = {}
        self.num_open: dict[str, int] = {}
        self.waiting: dict[str, list[Item]] = {}

    def open(self, tenant: str) -> None:
        rivals = [one for one, items in self.waiting.items() if items]
        rivals = rivals or [one for one, number in self.num_open.items() if number]
        clock = self.clocks.setdefault(tenant, 0.0)
        self.num_open.setdefault(tenant, 0)
        self.waiting.setdefault(tenant, [])
        if rivals:
            self.clocks[tenant] = max(clock, min(self.clocks[one] for one in rivals))
        self.num_open[tenant] += 1

    def close(self, tenant: str) -> None:
        self.num_open[tenant] -= 1
        if self.num_open[tenant]:
            return
        clocks = [self.clocks[one] for one, number in self.num_open.items() if number]
        for one in [one for one, number in self.num_open.items() if not number]:
            if not clocks or self.clocks[one] <= min(clocks):
                del self.num_open[one], self.clocks[one], self.waiting[one]
                self.last_charges.pop(one, None)

    def charge(self, tenant: str, cost: int) -> None:
        self.clocks[tenant] += cost
        self.num_charges += 1
        self.last_charges[tenant] = self.num_charges

    @property
    def first(self) -> Item:
        tenants = [tenant for tenant, items in self.waiting.items() if items]
        tenant = min(tenants, key=self._turn)
        return self.waiting[tenant][0]

    def _turn(self, tenant: str) -> tuple[float, int, tuple[int, ...]]:
        order = self.waiting[tenant][0].order
        return self.clocks[tenant], self.last_charges.get(tenant, 0), order


class QueuePair:
    """A queue beside a plain one; requests wait, are served for a while, and end."""

    def __init__(self) -> None:
        self.queue, self.plain = FairQueue[Item](), PlainQueue()
        self.waiting: list[Item] = []
        self.served: list[Item] = []
        self._num_arrivals = 0

    def send(self, tenant: str, cost: int) -> None:
        self._num_arrivals += 1
        self.plain.open(tenant)
        share = self.queue.open_share(tenant)
        # The arrival makes orders differ.
        item = Item((cost % 3, self._num_arrivals), share, cost)
        self._insert(item)

    def serve(self) -> None:
        """Serve the first item."""
        item = self.queue.first
        assert item is self.plain.first
        self.remove(item)
        self.queue.charge(item.share, item.cost)
        self.plain.charge(item.share.tenant, item.cost)
        self.served.append(item)

    def run(self, cost: int) -> None:
        """Serve one of the items further, or put it back."""
        item = self.served[cost % len(self.served)]
        item.share.time += cost
        self.plain.clocks[item.share.tenant] += cost
        if cost % 4 == 0:
            self.served.remove(item)
            self._insert(item)

    def end(self, cost: int) -> None:
        """End one of the items, waiting or not."""
        items = self.waiting + self.served
        item = items[cost % len(items)]
        if item in self.waiting:
            self.remove(item)
        else:
            self.served.remove(item)
        self.queue.close_share(item.share)
        self.plain.close(item.share.tenant)

    def put_all_back(self) -> None:
        self.queue.clear()
        for items in self.plain.waiting.values():
            items.clear()
        self.waiting, items = [], self.waiting + self.served
        self.served = []
        for item in items:
            self._insert(item)

    def _insert(self, item: Item) -> None:
        self.queue.insert(item)
        own = self.plain.waiting.setdefault(item.share.tenant, [])
        own.append(item)
        own.sort(key=lambda one: one.order)
        self.waiting.append(item)

    def remove(self, item: Item) -> None:
        self.queue.remove(item)
        self.plain.waiting[item.share.tenant].remove(item)
        self.waiting.remove(item)

    def check(self) -> None:
        clocks = {item.share.tenant: item.share.time for item in self.waiting + self.served}
        assert clocks.items() <= self.plain.clocks.items()
        assert self.queue.num_shares == len(self.plain.clocks)
        assert len(self.queue) == len(self.waiting) == len(list(self.queue))
        assert bool(self.queue) == bool(self.waiting)
        if self.waiting:
            assert self.queue.first is self.plain.first


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from("abcd"), st.integers(1, 6)),
        min_size=50,
        max_size=50,
    )
)
def test_the_queue_answers_as_one_that_walks_through_all_tenants(
    events: list[tuple[int, str, int]],
) -> None:
    pair = QueuePair()
    for event, tenant, cost in events:
        if event < 4:
            pair.send(tenant, cost)
        elif event < 6 and pair.waiting:
            pair.serve()
        elif event < 8 and pair.served:
            pair.run(cost)
        elif event < 9 and pair.waiting + pair.served:
            pair.end(cost)
        elif event == 9:
            pair.put_all_back()
        pair.check()
