"""Where requests go: keys of prompts, placement, and how Serve's router asks ours."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaQueueLengthInfo,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest, RunningReplica

from cluster.serving.ray_serve.placement import (
    MAX_CHOICES,
    LastServed,
    Owners,
    Placement,
    RoutingKey,
    prefix_key,
    replica_key,
)
from cluster.serving.ray_serve.router import AffinityRouter, HandleRequest
from cluster.serving.text.template_arguments import ChatMessage, ChatPrompt

if TYPE_CHECKING:
    from collections.abc import Mapping

_NUM_TURNS = 20
NAMES = tuple("abcdefgh")
CHAT = (ChatMessage("system", "Be brief."), ChatMessage("user", "Hello"))


class ReplicaId(NamedTuple):
    unique_id: str


class SilentReplica:
    """A replica that does not respond."""

    replica_id = ReplicaId("a")
    routing_stats: dict[str, float] = {}  # noqa: RUF012  # a stand-in for Serve's


class CountedRouter(AffinityRouter):
    """Counts how often Serve asks; raises instead of blocking the test."""

    num_choices = 0

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        self.num_choices += 1
        assert self.num_choices < 1000, "Serve asks without a pause."
        return await super().choose_replicas(candidate_replicas, pending_request)


async def test_event_loop_runs_on_while_no_replica_responds() -> None:
    router: Any = CountedRouter(  # Any: its replicas are stand-ins
        deployment_id=DeploymentID("a"), handle_source=DeploymentHandleSource.PROXY
    )
    router.initialize_state(lease_s=30.0, continues_calls=True)
    router._replicas = {SilentReplica.replica_id: SilentReplica()}
    router._replicas_list = [SilentReplica()]
    for _ in range(5):
        router._watch._pulse.tick([SilentReplica.replica_id], 2.0)
    metadata = RequestMetadata(request_id="r", internal_request_id="r")
    choosing = asyncio.create_task(
        anext(router._choose_replicas_with_backoff(PendingRequest([], {}, metadata=metadata)))
    )
    for _ in itertools.repeat(None, _NUM_TURNS):
        await asyncio.sleep(0.01)
    assert not choosing.done()
    choosing.cancel()


class Answer:
    """What a replica answers to a request; None if it does not answer."""

    def __init__(self, answer: ReplicaQueueLengthInfo | None) -> None:
        self._answer = answer
        self.is_cancelled = False

    async def get_rejection_response(self) -> ReplicaQueueLengthInfo:
        if self._answer is None:
            await asyncio.sleep(3600.0)
        assert self._answer is not None
        return self._answer

    def cancel(self) -> None:
        self.is_cancelled = True


class Replica:
    """A replica that gives its answers one after another."""

    def __init__(self, name: str, *answers: ReplicaQueueLengthInfo | None) -> None:
        self.replica_id = ReplicaId(name)
        self.routing_stats: dict[str, float] = {}
        self.answers = [Answer(one) for one in answers]
        self._left = iter(self.answers)

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> Answer:
        return next(self._left)


class RouterOf(AffinityRouter):
    """Knows these replicas, and sends what it sends elsewhere to the first."""

    def __init__(self, *replicas: Replica) -> None:
        super().__init__(
            deployment_id=DeploymentID("a"),
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
        )
        self.initialize_state(lease_s=30.0, continues_calls=True)
        self.replicas: Any = list(replicas)  # Any: stand-ins, also below
        self._loads = {one.replica_id: (0.0, 0.0) for one in self.replicas}

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> Any:
        return self.replicas[0]


def handle_request(method: str, *args: object, **kwargs: object) -> PendingRequest:
    metadata = RequestMetadata("r", "r", call_method=method, is_streaming=method == "generate")
    return PendingRequest(list(args), kwargs, metadata)


def session(key: RoutingKey) -> PendingRequest:
    return PendingRequest([], {}, RequestMetadata("r", "r", session_id=key.as_session_id()))


async def first_choice(request: PendingRequest, router: RouterOf | None = None) -> str:
    """Return the name of the replica that a router, mostly of an idle deployment, tries first."""
    router = router or RouterOf(*map(Replica, NAMES))
    return (await router.choose_replicas(router.replicas, request))[0][0].replica_id.unique_id


@pytest.mark.parametrize(
    "prompt", ["Once upon a time", [5, 6, 7], (5, 6, 7), ChatPrompt(CHAT)], ids=str
)
async def test_prompts_of_handles_go_to_the_replica_of_their_prefix(prompt: Any) -> None:
    key = prefix_key(prompt)
    assert key is not None
    placement = Placement(draws=Random(1))
    placement.set_replicas(dict.fromkeys(NAMES, 0.0))
    expected = placement.choose_replicas(RoutingKey(key))[0]
    assert await first_choice(handle_request("generate", prompt)) == expected
    assert await first_choice(handle_request("generate", prompt=prompt)) == expected


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("embed", [["text"]]), ("generate", []), ("generate", [5])],
    ids=["embed", "missing", "number"],
)
async def test_calls_of_handles_without_a_prefix_go_to_the_least_loaded_replica(
    method: str, arguments: list[object]
) -> None:
    request_ = handle_request(method, *arguments)
    router = RouterOf(*map(Replica, NAMES))
    for name in NAMES[1:]:
        router.on_request_routed(request_, ReplicaId(name), Answer(None))  # type: ignore[arg-type]  # stand-ins
    assert await first_choice(request_, router) == NAMES[0]


async def test_a_session_that_load_moved_stays_with_its_owner_alone() -> None:
    router: Any = RouterOf(*map(Replica, NAMES))
    mine, other = session(RoutingKey("s", "owner")), session(RoutingKey("s", "another"))
    own = await first_choice(mine, router)
    for _ in range(40):
        router.on_request_routed(mine, ReplicaId(own), Answer(None))
    moved = await first_choice(mine, router)
    assert moved != own
    # Another report of loads.
    router._num_sent = {}
    router.replicas = list(router.replicas)
    assert await first_choice(mine, router) == moved
    assert await first_choice(other, router) == own


async def test_a_replica_that_does_not_respond_gets_nothing_until_it_responds_again() -> None:
    router: Any = RouterOf(*map(Replica, NAMES))
    mine = session(RoutingKey("s"))
    own = ReplicaId(await first_choice(mine, router))
    for _ in range(5):
        router._watch._pulse.tick([own], 2.0)
    chosen = await router.choose_replicas(router.replicas, mine)
    assert own not in [one.replica_id for (one,) in chosen]
    assert len(chosen) == len(NAMES) - 1
    router._watch._pulse.note_answer(own)
    assert await first_choice(mine, router) == own.unique_id


async def test_a_stream_that_continues_elsewhere_counts_for_its_replica() -> None:
    replica = Replica("b", ReplicaQueueLengthInfo(False, 9), ReplicaQueueLengthInfo(True, 3))
    router: Any = RouterOf(replica)
    request = HandleRequest(handle_request("generate", "Once"))
    result = await router._send_elsewhere(request)
    rejected, accepted = replica.answers
    assert (result, rejected.is_cancelled, accepted.is_cancelled) == (accepted, True, False)
    assert router._load(replica.replica_id) == pytest.approx(0.01)
    assert router._replica_queue_len_cache.get(replica.replica_id) == 3


async def test_a_stream_that_no_replica_accepts_in_time_is_cancelled_there() -> None:
    replica = Replica("b", None)
    router: Any = RouterOf(replica)
    request = HandleRequest(handle_request("generate", "Once"))
    with suppress(TimeoutError):
        await asyncio.wait_for(router._send_elsewhere(request), 0.05)
    assert replica.answers[0].is_cancelled


PLACEMENT_NAMES = st.lists(
    st.text("abcdef0123456789", min_size=4, max_size=8), min_size=1, unique=True
)
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


@given(PLACEMENT_NAMES, st.randoms())
def test_a_key_that_names_a_replica_puts_it_first(names: list[str], chance: Random) -> None:
    name = chance.choice(names)
    assert first_of(RoutingKey(replica_key(name)), dict.fromkeys(names, 0.2)) == name


@given(LOADS)
def test_without_a_key_the_least_loaded_of_those_drawn_is_first(loads: dict[str, float]) -> None:
    chosen = placement_of(loads).choose_replicas(None)
    assert [loads[one] for one in chosen] == sorted(loads[one] for one in chosen)
    if len(loads) <= MAX_CHOICES:
        assert loads[chosen[0]] == min(loads.values())


@given(PLACEMENT_NAMES, st.text())
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
    assert prefix_key([1, object()]) is None  # type: ignore[arg-type]  # a program's mistake


def test_a_session_id_carries_a_key_and_its_owner() -> None:
    key = RoutingKey("prefix-1", "a" * 32)
    assert RoutingKey.of_session_id(key.as_session_id()) == key
    assert RoutingKey.of_session_id("mine") == RoutingKey("mine")


def test_owners_are_told_apart_by_their_credentials_within_a_process() -> None:
    owners = Owners()
    given = ["Bearer a", "Bearer b", "", None]
    digests = [owners.owner_of(one) for one in given]
    assert len(set(digests)) == 4
    assert digests == [owners.owner_of(one) for one in given]
    assert Owners().owner_of("Bearer a") not in digests
