"""Where requests go: pure placement, with random keys and loads."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from cluster.serving.ray_serve.placement import (
    MAX_CHOICES,
    LastServed,
    Placement,
    RoutingKey,
    replica_key,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

NAMES = st.lists(st.text("abcdef0123456789", min_size=4, max_size=8), min_size=1, unique=True)
LOADS = st.dictionaries(
    st.text("abcdef0123456789", min_size=4, max_size=8),
    st.floats(0, 4, allow_nan=False),
    min_size=1,
)
KEY = RoutingKey("key", "owner")


def placement_of(loads: Mapping[str, float]) -> Placement:
    placement = Placement(slack=1.25, calm=0.25, draws=Random(3))
    placement.set_replicas(loads)
    return placement


def first_of(key: RoutingKey | None, loads: Mapping[str, float]) -> str:
    return placement_of(loads).choose_replicas(key)[0]


@given(LOADS, st.none() | st.text())
def test_some_replicas_are_named_once_each(loads: dict[str, float], text: str | None) -> None:
    key = None if text is None else RoutingKey(text)
    chosen = placement_of(loads).choose_replicas(key)
    assert len(chosen) == len(set(chosen)) == min(len(loads), MAX_CHOICES)
    assert set(chosen) <= set(loads)


def test_there_is_no_choice_without_replicas() -> None:
    assert placement_of({}).choose_replicas(KEY) == []
    assert placement_of({}).choose_replicas(None) == []


@given(LOADS, st.text())
def test_no_replica_is_sent_more_than_its_share(loads: dict[str, float], text: str) -> None:
    mean = sum(loads.values()) / len(loads)
    # Sums are rounded: a load can exceed the mean of equal loads by this much.
    assert loads[first_of(RoutingKey(text), loads)] <= max(1.25 * mean, 0.25) + 1e-9


@given(NAMES, st.randoms())
def test_a_key_that_names_a_replica_puts_it_first(names: list[str], chance: Random) -> None:
    name = chance.choice(names)
    assert first_of(RoutingKey(replica_key(name)), dict.fromkeys(names, 0.2)) == name


@given(LOADS)
def test_without_a_key_the_least_loaded_of_those_drawn_is_first(loads: dict[str, float]) -> None:
    chosen = placement_of(loads).choose_replicas(None)
    assert [loads[one] for one in chosen] == sorted(loads[one] for one in chosen)
    if len(loads) <= MAX_CHOICES:
        assert loads[chosen[0]] == min(loads.values())


@given(NAMES, st.text())
def test_removing_a_replica_moves_only_its_keys(names: list[str], text: str) -> None:
    key, loads = RoutingKey(text, "owner"), dict.fromkeys(names, 0.1)
    first = first_of(key, loads)
    for gone in names:
        if gone != first:
            placement = placement_of(loads)
            placement.set_replicas({name: 0.1 for name in names if name != gone})
            assert placement.choose_replicas(key)[0] == first


def test_a_key_leaves_its_replica_when_that_has_too_much() -> None:
    first = first_of(KEY, dict.fromkeys("abc", 0.1))
    second = first_of(KEY, dict.fromkeys({*"abc"} - {first}, 0.1))
    loads = dict.fromkeys("abc", 0.1)
    assert first_of(KEY, {**loads, first: 0.24}) == first
    assert first_of(KEY, {**loads, first: 0.9}) == second
    assert first_of(KEY, dict.fromkeys("abc", 0.9)) == first


def test_requests_sent_since_a_report_count() -> None:
    placement = placement_of({"a": 0.1, "b": 0.3})
    assert placement.choose_replicas(None) == ["a", "b"]
    placement.add_load("a", 0.3)
    placement.add_load("gone", 9.0)
    assert placement.choose_replicas(None) == ["b", "a"]
    placement.set_replicas({"a": 0.1, "b": 0.3})
    assert placement.choose_replicas(None) == ["a", "b"]


def test_keys_spread_evenly() -> None:
    placement = placement_of({f"replica-{number}": 0.0 for number in range(40)})
    counts = Counter(
        placement.choose_replicas(RoutingKey(f"key-{number}"))[0] for number in range(20_000)
    )
    assert len(counts) == 40
    # Five standard deviations of a fair draw.
    assert all(abs(number - 500) < 5 * 500**0.5 for number in counts.values())


def test_a_key_that_load_moved_stays_with_the_replica_that_served_it() -> None:
    loads = dict.fromkeys("abc", 0.1)
    own = first_of(KEY, loads)
    placement = placement_of({**loads, own: 0.9})
    moved = placement.choose_replicas(KEY)[0]
    assert moved != own
    placement.set_replicas(loads)
    # Another owner of the same text does not find out.
    assert placement.choose_replicas(RoutingKey(KEY.text, "another"))[0] == own
    assert placement.choose_replicas(RoutingKey(KEY.text))[0] == own
    assert placement.choose_replicas(KEY)[0] == moved
    # Too much load there sends it back, and then it stays with its own.
    placement.set_replicas({**loads, moved: 0.9})
    assert placement.choose_replicas(KEY)[0] == own
    placement.set_replicas(loads)
    assert placement.choose_replicas(KEY)[0] == own


def test_a_key_forgets_a_replica_that_has_gone() -> None:
    loads = dict.fromkeys("abc", 0.1)
    own = first_of(KEY, loads)
    placement = placement_of({**loads, own: 0.9})
    moved = placement.choose_replicas(KEY)[0]
    del loads[moved]
    placement.set_replicas(loads)
    assert placement.choose_replicas(KEY)[0] == own


def test_a_key_that_names_a_replica_is_not_moved_for_good() -> None:
    key, loads = RoutingKey(replica_key("a"), "owner"), dict.fromkeys("abc", 0.1)
    placement = placement_of({**loads, "a": 0.9})
    assert placement.choose_replicas(key)[0] != "a"
    placement.set_replicas(loads)
    assert placement.choose_replicas(key)[0] == "a"


def test_the_key_used_longest_ago_is_forgotten_first() -> None:
    served = LastServed(most_keys=2)
    keys = [RoutingKey(text, "owner") for text in "abc"]
    for key in (keys[0], keys[1], keys[0], keys[2]):
        served.note_replica(key, "replica")
    assert [served.find_replica(key) for key in keys] == ["replica", None, "replica"]
    served.forget(keys[0])
    assert len(served) == 1
