"""Shares of backlogged tenants, for random costs and arrivals."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cluster.scheduling.fair_queue import Backlog, FairQueue, LeastFirst, Share
from pagedray.errors import OverloadedError

MAX_COST = 50
FEW = settings(max_examples=50)
COSTS = st.lists(st.integers(1, MAX_COST), min_size=1, max_size=20)


@dataclass(eq=False)
class Item:
    order: tuple[int, ...]
    share: "Share[Item]"
    cost: int


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
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(1, MAX_COST)), max_size=40))
def test_a_tenant_alone_is_served_in_order(sent: list[tuple[int, int]]) -> None:
    server = Server({"a": 0.3})
    for priority, cost in sent:
        server.send("a", cost, priority)
    while server.queue:
        server.serve()
    orders = [item.order for item in server.order]
    assert orders == sorted(orders)
    assert server.queue.num_shares <= 1


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


@FEW
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("abc"), st.integers(1, MAX_COST)),
            st.none(),
        ),
        max_size=80,
    )
)
def test_every_item_is_served_once_and_idle_tenants_are_forgotten(
    events: list[tuple[str, int] | None],
) -> None:
    server = Server({"a": 1.0, "b": 2.0, "c": 0.5})
    num_sent = 0
    for event in events:
        if event is not None:
            server.send(*event)
            num_sent += 1
        elif server.queue:
            server.serve()
        assert len(server.queue) + len(server.order) == num_sent
    while server.queue:
        server.serve()
    assert len(set(map(id, server.order))) == num_sent
    for number in range(3 * MAX_COST):
        # Each new tenant starts at the clock of the others, so that old debts are dropped.
        server.send(f"d{number}", 2)
        server.weights[f"d{number}"] = 1.0
        server.served[f"d{number}"] = 0.0
        server.serve()
    assert server.queue.num_shares <= 5


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


def test_a_tenant_whose_items_were_removed_is_not_next() -> None:
    queue = FairQueue[Item]()
    gone, back = queue.open_share("gone"), queue.open_share("back")
    for share in (gone, back):
        queue.insert(Item((0, 1), share, 1))
    queue.clear()
    assert not queue.has_first
    item = Item((0, 2), back, 1)
    queue.insert(item)
    assert queue.first is item


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
