"""Calls of methods of certain replicas, bypassing Serve's routing.

Serve's routers drop a draining replica while its streams still run; Ray finds its actor by name.
This uses private parts of Serve.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import uuid
from typing import TYPE_CHECKING, Any

import ray
from ray.serve._private.common import DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.constants import RAY_SERVE_ENABLE_DIRECT_INGRESS, SERVE_NAMESPACE
from ray.serve.context import _get_serve_request_context
from ray.serve.request_router import PendingRequest

if TYPE_CHECKING:
    from collections.abc import Collection

    from ray.actor import ActorHandle
    from ray.serve.request_router import RunningReplica

__all__ = ["call_named", "call_others", "call_replica", "current_call_id", "find_replica"]

logger = logging.getLogger(__name__)


def current_call_id() -> str | None:
    """Return Serve's id of the current task's call; None if no router sent it."""
    # Direct ingress has its own connections, and sees their ends.
    if RAY_SERVE_ENABLE_DIRECT_INGRESS:
        return None
    return _get_serve_request_context()._internal_request_id or None


async def call_replica(replica: RunningReplica, method: str, *arguments: object) -> object:
    """Call a method of a replica and return its result. Raises RayError."""
    request = PendingRequest(args=list(arguments), kwargs={}, metadata=_metadata(method))
    return await replica.try_send_request(request, with_rejection=False).get_async()


# Any: Serve's class of replicas, here and below.
def find_replica(deployment: DeploymentID, name: str) -> ActorHandle[Any]:
    """Return the actor of a deployment's replica. Raises ValueError if there is none."""
    full_name = ReplicaID(unique_id=name, deployment_id=deployment).to_full_id_str()
    return ray.get_actor(full_name, namespace=SERVE_NAMESPACE)


async def call_named(actor: ActorHandle[Any], method: str, *arguments: object) -> object:
    """Call a method of a replica, given its actor, and return its result. Raises RayError."""
    return await actor.handle_request.remote(pickle.dumps(_metadata(method)), *arguments)


async def call_others(
    deployment: DeploymentID,
    excluded: Collection[str],
    method: str,
    *arguments: object,
    timeout_s: float,
) -> None:
    """Call a method of all replicas except some, and wait up to `timeout_s`.

    Calls that time out are still executed, for instance in replicas that are starting.
    """
    names = await asyncio.to_thread(_names, deployment, excluded)
    calls = [asyncio.create_task(_call_found(one, method, arguments)) for one in names]
    if calls:
        await asyncio.wait(calls, timeout=timeout_s)


def _names(deployment: DeploymentID, excluded: Collection[str]) -> list[tuple[str, str]]:
    """Return the names and namespaces of the actors of a deployment's replicas."""
    found = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        if ReplicaID.is_full_id_str(name):
            replica = ReplicaID.from_full_id_str(name)
            if replica.deployment_id == deployment and replica.unique_id not in excluded:
                found.append((name, actor["namespace"]))
    return found


async def _call_found(name: tuple[str, str], method: str, arguments: tuple[object, ...]) -> None:
    try:
        actor = await asyncio.to_thread(ray.get_actor, name[0], namespace=name[1])
        await call_named(actor, method, *arguments)
    except Exception as error:
        logger.debug("Could not call %s: %s", name[0], error)


def _metadata(method: str) -> RequestMetadata:
    call_id = str(uuid.uuid4())
    return RequestMetadata(request_id=call_id, internal_request_id=call_id, call_method=method)
