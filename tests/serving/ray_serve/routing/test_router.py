"""How Serve's request router asks ours for replicas, and where ours sends requests.

Replicas and their answers are stand-ins for Serve's.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaQueueLengthInfo,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest, RunningReplica

from cluster.serving.ray_serve.handle_stream import HandleRequest
from cluster.serving.ray_serve.placement import Placement, RoutingKey, prefix_key
from cluster.serving.ray_serve.router import AffinityRouter
from cluster.serving.text.templates.chat_prompt import ChatMessage, ChatPrompt

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
