"""How requests find a replica through Ray Serve: by session, by prefix, and by load.

It runs in Serve's proxies and in whoever holds a handle. What it knows of a replica is a second
old, so that it counts what it has sent since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.serve.request_router import RequestRouter, RunningReplica

from cluster.serving.ray_serve.affinity import prefix_key, routing_order
from cluster.serving.ray_serve.renewals import Renewals

if TYPE_CHECKING:
    from ray.serve._private.common import ReplicaID, RunningReplicaInfo
    from ray.serve._private.replica_result import ReplicaResult
    from ray.serve.request_router import PendingRequest

__all__ = ["AffinityRouter"]

_RENEWALS_PER_LEASE = 6


class AffinityRouter(RequestRouter):
    """Sends what begins alike, or belongs to one session, to one replica while its load allows."""

    def initialize_state(  # type: ignore[override]  # Serve passes keywords
        self,
        *,
        slack: float = 1.25,
        calm: float = 0.25,
        call_load: float = 0.01,
        lease_s: float = 30.0,
    ) -> None:
        """Take what the deployment is configured with; loads are shares of a replica's cache.

        `slack` and `calm` bound how much more than others a replica may have; `call_load` is
        what a call counts that a replica has not told of yet. A stream that nobody reads for
        `lease_s` is to end.
        """
        self._slack = slack
        self._calm = calm
        self._call_load = call_load
        self._loads: dict[ReplicaID, tuple[float, float]] = {}
        self._num_sent: dict[ReplicaID, int] = {}
        self._renewals = Renewals(period_s=lease_s / _RENEWALS_PER_LEASE, idle_s=lease_s)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the replicas there are, and what they tell of themselves."""
        told = {one.replica_id: _told_load(one) for one in replicas}
        # What a replica tells includes what it was sent before.
        self._num_sent = {
            one: count for one, count in self._num_sent.items() if told.get(one) == self._loads[one]
        }
        self._loads = told
        super().update_replicas(replicas)

    def create_replica_wrapper(self, replica_info: RunningReplicaInfo) -> RunningReplica:
        """Return the way to a replica, on which its streams are renewed."""
        return _LeasingReplica(replica_info, self._renewals)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates one by one, in the order in which they are to be asked."""
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        loads = {name: self._load(one.replica_id) for name, one in by_name.items()}
        names = routing_order(_key(pending_request), loads, slack=self._slack, calm=self._calm)
        return [[by_name[name]] for name in names]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Count a request that a replica was sent."""
        if replica_id in self._loads:
            self._num_sent[replica_id] = self._num_sent.get(replica_id, 0) + 1

    def _load(self, replica_id: ReplicaID) -> float:
        told, _ = self._loads.get(replica_id, (0.0, 0.0))
        return told + self._num_sent.get(replica_id, 0) * self._call_load


class _LeasingReplica(RunningReplica):
    """The way to one replica, which is told what of its streams is read."""

    def __init__(self, replica_info: RunningReplicaInfo, renewals: Renewals) -> None:
        super().__init__(replica_info)
        self._renewals = renewals

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> ReplicaResult:
        """Send a request."""
        result = super().try_send_request(pr, with_rejection)
        if pr.metadata.is_streaming:
            self._renewals.renew_stream(result, self, pr.metadata.internal_request_id)
        return result


def _told_load(replica: RunningReplica) -> tuple[float, float]:
    """Return the load that a replica tells of, and when it told."""
    stats = replica.routing_stats
    return float(stats.get("load", 0.0)), float(stats.get("reported_s", 0.0))


def _key(request: PendingRequest | None) -> str | None:
    if request is None:
        return None
    metadata = request.metadata
    if metadata.session_id:
        return str(metadata.session_id)
    if metadata.is_http_request or metadata.is_grpc_request or not request.args:
        return None
    prompt = request.args[0]
    return prefix_key(prompt) if isinstance(prompt, str | list | tuple) else None
