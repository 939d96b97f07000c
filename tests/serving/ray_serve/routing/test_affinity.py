"""Where requests go: pure placement, with random keys and loads."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from cluster.serving.inputs import ChatPrompt
from cluster.serving.ray_serve.routing.affinity import (
    prefix_key,
    rendezvous_order,
    replica_key,
    routing_order,
)
from cluster.serving.text.chat_template import ChatMessage

if TYPE_CHECKING:
    from random import Random

NAMES = st.lists(st.text("abcdef0123456789", min_size=4, max_size=8), min_size=1, unique=True)
LOADS = st.dictionaries(
    st.text("abcdef0123456789", min_size=4, max_size=8),
    st.floats(0, 4, allow_nan=False),
    min_size=1,
)


@given(LOADS, st.none() | st.text())
def test_every_replica_is_named_once(loads: dict[str, float], key: str | None) -> None:
    order = routing_order(key, loads, slack=1.25, calm=0.25)
    assert sorted(order) == sorted(loads)


@given(LOADS, st.text())
def test_no_replica_is_sent_more_than_its_share(loads: dict[str, float], key: str) -> None:
    first = routing_order(key, loads, slack=1.25, calm=0.25)[0]
    mean = sum(loads.values()) / len(loads)
    # Sums are rounded: a load can exceed the mean of equal loads by this much.
    assert loads[first] <= max(1.25 * mean, 0.25) + 1e-9


@given(NAMES, st.randoms())
def test_a_key_that_names_a_replica_puts_it_first(names: list[str], chance: Random) -> None:
    name = chance.choice(names)
    assert rendezvous_order(replica_key(name), names)[0] == name
    loads = dict.fromkeys(names, 0.2)
    assert routing_order(replica_key(name), loads, slack=1.25, calm=0.25)[0] == name


@given(LOADS)
def test_without_a_key_the_least_loaded_is_first(loads: dict[str, float]) -> None:
    first = routing_order(None, loads, slack=1.25, calm=0.25)[0]
    assert loads[first] == min(loads.values())


@given(NAMES, st.text())
def test_removing_a_replica_moves_only_its_keys(names: list[str], key: str) -> None:
    loads = dict.fromkeys(names, 0.1)
    first = routing_order(key, loads, slack=1.25, calm=0.25)[0]
    for gone in names:
        if gone != first:
            rest = {name: load for name, load in loads.items() if name != gone}
            assert routing_order(key, rest, slack=1.25, calm=0.25)[0] == first


def test_a_key_stays_until_its_replica_has_too_much() -> None:
    first, second, _ = rendezvous_order("key", ["a", "b", "c"])
    loads = dict.fromkeys("abc", 0.1)
    assert routing_order("key", {**loads, first: 0.24}, slack=1.25, calm=0.25)[0] == first
    assert routing_order("key", {**loads, first: 0.9}, slack=1.25, calm=0.25)[0] == second
    assert routing_order("key", dict.fromkeys("abc", 0.9), slack=1.25, calm=0.25)[0] == first


def test_keys_spread_evenly() -> None:
    names = [f"replica-{number}" for number in range(4)]
    counts = Counter(rendezvous_order(f"key-{number}", names)[0] for number in range(4000))
    assert all(850 < counts[name] < 1150 for name in names)


def test_later_turns_of_a_conversation_keep_its_key() -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "And now?"},
    ]
    key = prefix_key(turns[:2])
    assert key == prefix_key(turns)
    assert key != prefix_key([turns[0], turns[3]])
    # In every representation.
    messages = tuple(ChatMessage(role=one["role"], content=one["content"]) for one in turns)
    assert prefix_key(ChatPrompt(messages)) == key


def test_prompts_with_a_common_prefix_have_one_key() -> None:
    assert prefix_key("x" * 2000) == prefix_key("x" * 1024 + "y")
    assert prefix_key("x" * 1023 + "y") != prefix_key("x" * 1024)
    assert prefix_key([7] * 300) == prefix_key((7,) * 400)
    assert prefix_key("") is None
    assert prefix_key(()) is None
    assert prefix_key("\ud800") is not None
