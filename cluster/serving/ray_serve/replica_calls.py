"""Calls of methods of certain replicas, bypassing Serve's routing.

Serve's routers drop a draining replica while its streams still run; Ray finds its actor by name.
This uses private parts of Serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import time
import uuid
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

import ray
from ray.serve._private.common import DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.constants import RAY_SERVE_ENABLE_DIRECT_INGRESS, SERVE_NAMESPACE
from ray.serve.context import _get_serve_request_context
from ray.serve.request_router import PendingRequest

from pagedray.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from ray.actor import ActorHandle
    from ray.serve._private.replica_result import ReplicaResult
    from ray.serve.request_router import RunningReplica

__all__ = [
    "ReplicaDiedError",
    "ReplicaReads",
    "call_named",
    "call_others",
    "call_replica",
    "current_call_id",
    "find_replica",
]

logger = logging.getLogger(__name__)

Found = TypeVar("Found")


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


class ReplicaDiedError(EngineError):
    """The replica died while it served the request."""

    def __init__(self) -> None:
        super().__init__("The replica that served the request died; retry the request.")


class ReplicaReads:
    """Wraps the methods by which Serve reads from a replica."""

    def __init__(
        self,
        result: ReplicaResult,
        note_accepted: Callable[[], None] | None = None,
        note_cancelled: Callable[[], None] | None = None,
        is_last: Callable[[Any], bool] | None = None,  # Any: items are the deployment's
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`note_accepted` is called, from the router's thread, when the replica has the request.

        `note_cancelled` is called when Serve cancels a request that the replica has. `is_last`
        recognizes the last item of a complete stream; a stream that ends earlier raises
        ReplicaDiedError.
        """
        self._is_last = is_last
        self._is_complete = is_last is None
        self._kind = type(result)
        self._result = ref(result)
        self._note_accepted = note_accepted
        self._note_cancelled = note_cancelled
        # Serve also cancels requests that a replica rejects or has cancelled.
        self._is_at_replica = note_accepted is None
        self._error: Exception | None = None
        self._reader: asyncio.Task[Any] | None = None  # Any: tasks of Serve's
        self._is_waiting = False
        self._clock = clock
        self._read_s = clock()
        # Handles call these on the instance, so instance attributes override them.
        result.__anext__ = self._anext  # type: ignore[method-assign]  # see above
        result.__next__ = self._next  # type: ignore[method-assign]  # see above
        result.get_async = self._get  # type: ignore[method-assign]  # see above
        result.get_rejection_response = self._accepted  # type: ignore[method-assign, assignment]  # see above
        result.cancel = self._cancel  # type: ignore[method-assign]  # see above

    @property
    def result(self) -> ReplicaResult:
        """The response, while a caller has it."""
        result = self._result()
        assert result is not None
        return result

    def idle_s(self) -> float:
        """Return the time since the last read; 0 during a read."""
        return 0.0 if self._is_waiting else self._clock() - self._read_s

    def fail(self, error: Exception) -> None:
        """End the current read and all later reads with `error`.

        May be called from any thread. A read that blocks a thread is not interrupted.
        """
        # A read sets its task before it looks for the error, so it cannot miss both.
        self._error = error
        reader = self._reader
        if reader is not None:
            # The loop of a program with a handle may be closed, with the reader left in it.
            with contextlib.suppress(RuntimeError):
                reader.get_loop().call_soon_threadsafe(self._interrupt, reader)
        result = self._result()
        if result is not None:
            self._kind.cancel(result)

    def _interrupt(self, reader: asyncio.Task[Any]) -> None:  # Any: see above.
        if self._reader is reader:
            reader.cancel()

    async def _anext(self) -> object:
        self._is_waiting = True
        try:
            return self._noted(await self._read(self._kind.__anext__))
        except StopAsyncIteration:
            if not self._is_complete:
                raise ReplicaDiedError from None
            raise
        finally:
            self._is_waiting, self._read_s = False, self._clock()

    async def _get(self) -> object:
        return await self._read(self._kind.get_async)

    async def _accepted(self) -> object:
        response = await self._read(self._kind.get_rejection_response)
        if response is not None and response.accepted and self._note_accepted is not None:
            self._is_at_replica = True
            self._note_accepted()
        return response

    def _cancel(self) -> None:
        if self._is_at_replica and self._note_cancelled is not None:
            self._note_cancelled()
        result = self._result()
        if result is not None:
            self._kind.cancel(result)

    def _next(self) -> object:
        self._is_waiting = True
        try:
            if self._error is not None:
                raise self._error
            return self._noted(self._kind.__next__(self.result))
        except StopIteration:
            if not self._is_complete:
                raise ReplicaDiedError from None
            raise
        finally:
            self._is_waiting, self._read_s = False, self._clock()

    def _noted(self, item: Found) -> Found:
        if self._is_last is not None and self._is_last(item):
            self._is_complete = True
        return item

    async def _read(self, method: Callable[[ReplicaResult], Awaitable[Found]]) -> Found:
        reader = asyncio.current_task()
        assert reader is not None
        self._reader = reader
        try:
            if self._error is not None:
                raise self._error
            return await method(self.result)
        except asyncio.CancelledError:
            if reader.cancelling() == 0:
                self._is_at_replica = False
            if self._error is None or reader.uncancel() > 0:
                raise
            raise self._error from None
        finally:
            self._reader = None
