"""The member with the least key, while keys grow and members come and go."""

import weakref

import hypothesis.strategies as st
from hypothesis import given, settings

from cluster.scheduling.fair_queue import LeastFirst


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
