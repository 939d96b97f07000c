"""Calls of a replica's methods, past Serve's choice among replicas that take requests.

Serve's routers forget a replica that is to stop, though its streams run on; Ray knows it by its
name as long as it lives. What is used of Serve here is its own way to a replica.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import uuid
from typing import TYPE_CHECKING

import ray
from ray.serve._private.common import DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.constants import RAY_SERVE_ENABLE_DIRECT_INGRESS
from ray.serve.context import _get_serve_request_context
from ray.serve.request_router import PendingRequest

if TYPE_CHECKING:
    from collections.abc import Collection

    from ray.serve.request_router import RunningReplica

__all__ = ["call_others", "call_replica", "current_call_id"]

logger = logging.getLogger(__name__)


def current_call_id() -> str | None:
    """Return Serve's id of the call that the current task answers; None if no router sent it."""
    # Direct ingress has connections of its own, which tell of their ends.
    if RAY_SERVE_ENABLE_DIRECT_INGRESS:
        return None
    return _get_serve_request_context()._internal_request_id or None


async def call_replica(replica: RunningReplica, method: str, *arguments: object) -> object:
    """Return what a method of a replica that a router knows returns. Raises RayError."""
    request = PendingRequest(args=list(arguments), kwargs={}, metadata=_metadata(method))
    return await replica.try_send_request(request, with_rejection=False).get_async()


async def call_others(
    deployment: DeploymentID,
    but: Collection[str],
    method: str,
    *arguments: object,
    timeout_s: float,
) -> None:
    """Call a method of all replicas but those of some ids, and wait for a moment at most.

    The call reaches them all the same; those that are starting answer late.
    """
    names = await asyncio.to_thread(_names, deployment, but)
    calls = [asyncio.create_task(_call_named(one, method, arguments)) for one in names]
    if calls:
        await asyncio.wait(calls, timeout=timeout_s)


def _names(deployment: DeploymentID, but: Collection[str]) -> list[tuple[str, str]]:
    """Return the name and the namespace of the actors of a deployment's replicas."""
    found = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        if ReplicaID.is_full_id_str(name):
            replica = ReplicaID.from_full_id_str(name)
            if replica.deployment_id == deployment and replica.unique_id not in but:
                found.append((name, actor["namespace"]))
    return found


async def _call_named(name: tuple[str, str], method: str, arguments: tuple[object, ...]) -> None:
    try:
        actor = await asyncio.to_thread(ray.get_actor, name[0], namespace=name[1])
        await actor.handle_request.remote(pickle.dumps(_metadata(method)), *arguments)
    except Exception as error:
        logger.debug("%s could not be called: %s", name[0], error)


def _metadata(method: str) -> RequestMetadata:
    call_id = str(uuid.uuid4())
    return RequestMetadata(request_id=call_id, internal_request_id=call_id, call_method=method)
