"""The other replicas of a deployment, from which a replica requests stored responses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError

from cluster.serving.ray_serve.routing.replica_calls import call_named, find_replica
from cluster.serving.responses.stored_responses import Kept, LostReplicaError

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.serve._private.common import ReplicaID

    from cluster.serving.responses.stored_responses import Action

__all__ = ["OtherServeReplicas"]

_TIMEOUT_S = 5.0
_MAX_LOOKUPS = 4
"""Replicas that are looked up at once; clients choose the names."""


class OtherServeReplicas:
    """Calls `kept_response` of replicas. It is an OtherReplicas."""

    def __init__(self, own_id: ReplicaID) -> None:
        self._own_id = own_id
        self._actors: dict[str, ActorHandle[Any]] = {}  # Any: as below
        self._lookups = asyncio.Semaphore(_MAX_LOOKUPS)

    @property
    def own_name(self) -> str:
        """The name of this replica."""
        return self._own_id.unique_id

    async def ask(self, replica: str, action: Action, tenant: str, response_id: str) -> Kept | None:
        """Return the answer of another replica; None if it keeps no such response of the tenant.

        Raises LostReplicaError.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                actor = await self._actor(replica)
                kept = await call_named(actor, "kept_response", action, tenant, response_id)
        # Ray finds no actor of that name, or it has died, hangs or is draining its last call.
        except (RayActorError, TimeoutError, ValueError) as error:
            self._actors.pop(replica, None)
            raise LostReplicaError(replica) from error
        assert kept is None or isinstance(kept, Kept)
        return kept

    async def _actor(self, replica: str) -> ActorHandle[Any]:  # Any: a class that Serve makes
        found = self._actors.get(replica)
        if found is None:
            async with self._lookups:
                found = await asyncio.to_thread(find_replica, self._own_id.deployment_id, replica)
            self._actors[replica] = found
        return found
