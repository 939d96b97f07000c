"""How Serve's request router asks ours for replicas."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, NamedTuple

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, RunningReplica

from cluster.serving.ray_serve.routing.router import AffinityRouter

_NUM_TURNS = 20


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
    router.initialize_state()
    router._replicas = {SilentReplica.replica_id: SilentReplica()}
    router._replicas_list = [SilentReplica()]
    router._watch.is_silent = lambda replica_id: True
    metadata = RequestMetadata(request_id="r", internal_request_id="r")
    choosing = asyncio.create_task(
        anext(router._choose_replicas_with_backoff(PendingRequest([], {}, metadata=metadata)))
    )
    for _ in itertools.repeat(None, _NUM_TURNS):
        await asyncio.sleep(0.01)
    assert not choosing.done()
    choosing.cancel()
