"""Shares of backlogged tenants, and the fair queue beside a plain one."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cluster.scheduling.fair_queue import Backlog, FairQueue, LeastFirst, Share
from pagedray.errors import OverloadedError


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
        assert len(self.queue._shares) == len(self.plain.clocks)
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


MAX_COST = 50
FEW = settings(max_examples=50)
COSTS = st.lists(st.integers(1, MAX_COST), min_size=1, max_size=20)


class Server:
    """Serves items one by one, and counts the cost served by tenant."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.queue = FairQueue[Item]()
        self.weights = weights
        self.served = dict.fromkeys(weights, 0.0)
        self.order: list[Item] = []
        self._num_arrivals = 0

    def send(self, tenant: str, cost: int, priority: int = 0) -> None:
        self._num_arrivals += 1
        share = self.queue.open_share(tenant)
        self.queue.insert(Item((priority, self._num_arrivals), share, cost))

    def serve(self) -> str:
        item = self.queue.first
        self.queue.charge(item.share, item.cost / self.weights[item.share.tenant])
        self.queue.remove(item)
        self.queue.close_share(item.share)
        self.served[item.share.tenant] += item.cost
        self.order.append(item)
        return item.share.tenant


@FEW
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 7.0]), min_size=2, max_size=4),
    before=COSTS,
    costs=st.lists(COSTS, min_size=4, max_size=4),
    num_rounds=st.integers(1, 60),
)
def test_tenants_that_wait_together_get_their_shares(
    weights: list[float], before: list[int], costs: list[list[int]], num_rounds: int
) -> None:
    names = [f"t{number}" for number in range(len(weights))]
    server = Server(dict(zip(names, weights, strict=True)))
    # One of them was served before, which is neither debt nor credit.
    for cost in before:
        server.send(names[0], cost)
        server.serve()
    begun = dict(server.served)
    position = 0
    num_waiting = dict.fromkeys(names, 0)
    for _ in range(num_rounds):
        for name, own in zip(names, costs, strict=False):
            # Two, so that no tenant's queue runs empty when its last item is served.
            while num_waiting[name] < 2:
                server.send(name, own[position % len(own)])
                num_waiting[name] += 1
                position += 1
        num_waiting[server.serve()] -= 1
        for one in names:
            for other in names:
                gap = (server.served[one] - begun[one]) / server.weights[one] - (
                    server.served[other] - begun[other]
                ) / server.weights[other]
                assert gap <= MAX_COST / server.weights[one] + MAX_COST / server.weights[other]


def test_one_request_does_not_wait_for_a_flood_of_another_tenant() -> None:
    server = Server({"many": 1.0, "one": 1.0})
    for _ in range(100):
        server.send("many", 10)
    server.serve()
    server.send("one", 10)
    assert "one" in (server.serve(), server.serve())


def test_a_newcomer_starts_at_the_clock_of_those_that_are_served() -> None:
    queue = FairQueue[Item]()
    long, short = queue.open_share("long"), queue.open_share("short")
    # Started last, but ended long ago.
    queue.charge(long, 17)
    queue.charge(short, 17)
    queue.close_share(short)
    long.time += 18_000
    assert queue.open_share("new").time == long.time


class Member:
    """A member with a key."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.key = 0


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from("ads+-"), st.integers(0, 7), st.integers(0, 20))))
def test_the_first_member_has_the_least_key(events: list[tuple[str, int, int]]) -> None:
    members = [Member(number) for number in range(8)]
    inside: set[Member] = set()
    found = LeastFirst[Member](lambda member: (member.key, member.number))
    for event, number, amount in events:
        member = members[number]
        if event == "a" or (event == "s" and member in inside):
            member.key -= amount
            found.add(member)
            inside.add(member)
        elif event == "d":
            found.discard(member)
            inside.discard(member)
        elif event == "+":
            member.key += amount
        elif event == "-" and amount == 0:
            found.clear()
            inside.clear()
        assert len(found) == len(inside)
        assert set(found) == inside
        if inside:
            assert found.first is min(inside, key=lambda one: (one.key, one.number))


def test_discarded_members_are_not_kept() -> None:
    found = LeastFirst[Member](lambda member: (member.key,))
    least = Member(0)
    found.add(least)
    discarded = []
    for number in range(1, 1000):
        member = Member(number)
        member.key = number
        found.add(member)
        found.discard(member)
        discarded.append(weakref.ref(member))
        assert found.first is least
    assert sum(one() is not None for one in discarded) < 100


def test_the_order_outlives_the_removal_of_entries() -> None:
    found = LeastFirst[Member](lambda member: (member.key,))
    members = [Member(number) for number in range(200)]
    for member in members:
        member.key = -member.number
        found.add(member)
    for _ in range(3):
        # Each time, all entries but the last become invalid.
        for member in members:
            member.key -= 1
            found.add(member)
    firsts = []
    while len(found):
        firsts.append(found.first.number)
        found.discard(found.first)
    assert firsts == list(range(199, -1, -1))


def rejection(backlog: Backlog, num_tokens: int = 1) -> OverloadedError:
    with pytest.raises(OverloadedError) as caught:
        backlog.check_room("", num_tokens)
    return caught.value


def filled(num_requests: int, *, num_tokens: int = 10, max_tokens: int = 10**6) -> Backlog:
    backlog = Backlog(max_requests=num_requests, max_tokens=max_tokens)
    for _ in range(num_requests):
        backlog.check_room("", num_tokens)
        backlog.add_request("", num_tokens)
    return backlog


def test_requests_and_their_tokens_are_bounded() -> None:
    assert "The queue is full: at most 2 requests may wait." in str(rejection(filled(2)))
    backlog = Backlog(max_requests=9, max_tokens=25)
    backlog.add_request("", 20)
    backlog.check_room("", 5)
    assert "would exceed the limit of 25" in str(rejection(backlog, 6))
    backlog.drop_request("", 20)
    backlog.check_room("", 6)


def test_one_request_alone_may_be_longer_than_all_that_may_wait() -> None:
    Backlog(max_requests=9, max_tokens=25).check_room("", 1000)


def test_retry_after_is_the_time_to_serve_half_of_the_queue() -> None:
    backlog = filled(100)
    assert rejection(backlog).retry_after_s == 1.0
    now_s = 0.0
    for _ in range(60):
        # 20 requests a second.
        backlog.tick(now_s)
        for _ in range(5):
            backlog.start_request("", 10)
            backlog.add_request("", 10)
        now_s += 0.25
    assert rejection(backlog).retry_after_s == pytest.approx(50 / 20, rel=0.05)


def test_retry_after_of_a_queue_of_tokens_uses_the_token_rate() -> None:
    backlog = filled(100, num_tokens=10, max_tokens=1000)
    for step in range(60):
        backlog.tick(step * 0.25)
        backlog.start_request("", 10)
        backlog.add_request("", 10)
    backlog.drop_request("", 10)
    # 40 tokens a second.
    assert rejection(backlog, 20).retry_after_s == pytest.approx(990 / 2 / 40, rel=0.05)


def test_the_rate_is_that_of_a_full_engine_and_not_of_the_arrivals() -> None:
    backlog = Backlog(max_requests=10, max_tokens=10**6)
    for step in range(20):
        backlog.add_request("", 1)
        backlog.start_request("", 1)
        backlog.tick(step * 0.25)
    for _ in range(10):
        backlog.add_request("", 1)
    assert rejection(backlog).retry_after_s == 1.0


def test_an_engine_that_starts_nothing_gives_a_minute() -> None:
    backlog = filled(10)
    for step in range(9):
        backlog.tick(step * 0.25)
    assert rejection(backlog).retry_after_s == 60.0


def test_no_tenant_is_rejected_for_the_queue_of_another() -> None:
    backlog = filled(4, max_tokens=40)
    backlog.check_room("other", 1000)
    backlog.add_request("other", 1000)
    with pytest.raises(OverloadedError, match="4 requests may wait"):
        backlog.check_room("other", 1)
    backlog.start_request("other", 1000)
    backlog.check_room("other", 1)
    assert "4 requests may wait" in str(rejection(backlog))
