"""`grpc.health.v1.Health` with bounds, since it answers clients without a key.

The library's own servicer stores any service name that a call watches, waits without limit for the
rest of a message, and answers an invalid message with a traceback.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from cluster.serving.rpc.call import Context

__all__ = ["HEALTH", "UNKNOWN_SERVICE", "Health", "service_of"]

HEALTH: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
UNKNOWN_SERVICE = "Unknown service."
_Status = health_pb2.HealthCheckResponse.ServingStatus
_MAX_REQUEST_BYTES = 256
_READ_TIMEOUT_S = 5.0
_MAX_WATCHES = 512
"""Open Watch calls. Check calls are answered at once, so they are not limited."""


class Health:
    """The serving status of some services, for Check and Watch."""

    def __init__(self, services: Iterable[str], *, read_timeout_s: float = _READ_TIMEOUT_S) -> None:
        """Services start as NOT_SERVING. The empty name is the whole server.

        `read_timeout_s` limits how long a call's message may take to arrive.
        """
        self._read_timeout_s = read_timeout_s
        self._is_serving = dict.fromkeys(("", *services), False)
        self._changed = asyncio.Condition()
        self._num_watches = 0

    async def set_serving(self, is_serving: bool) -> None:
        """Set the status of all services and notify Watch calls."""
        async with self._changed:
            self._is_serving = dict.fromkeys(self._is_serving, is_serving)
            self._changed.notify_all()

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Return the handlers of Check and Watch."""
        # Streaming handlers are called before a message has arrived.
        make = grpc.stream_stream_rpc_method_handler
        methods = {
            "Check": make(self._reading(self._check)),
            "Watch": make(self._reading(self._watch)),
        }
        return grpc.method_handlers_generic_handler(HEALTH, methods)

    def _reading(
        self, answer: Callable[[str, Context], Awaitable[None]]
    ) -> Callable[[object, Context], Awaitable[None]]:
        async def handle(_requests: object, context: Context) -> None:
            await answer(await self._read_service(context), context)

        return handle

    async def _read_service(self, context: Context) -> str:
        """Return the name of the requested service. Aborts the call if none arrives in time."""
        try:
            async with asyncio.timeout(self._read_timeout_s):
                body = await context.read()
        except TimeoutError:
            text = f"The request message did not arrive within {self._read_timeout_s:g} s."
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        try:
            return service_of(body)
        except InvalidRequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _check(self, service: str, context: Context) -> None:
        if service not in self._is_serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, UNKNOWN_SERVICE)
        await context.write(self._answer(service))

    async def _watch(self, service: str, context: Context) -> None:
        if self._num_watches >= _MAX_WATCHES:
            text = f"The server may have at most {_MAX_WATCHES} open Watch calls."
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._num_watches += 1
        try:
            await self._send_changes(service, context)
        finally:
            self._num_watches -= 1

    async def _send_changes(self, service: str, context: Context) -> None:
        sent = b""
        while True:
            if (answer := self._answer(service)) != sent:
                await context.write(answer)
                sent = answer
                continue
            async with self._changed:
                if self._answer(service) == sent:
                    await self._changed.wait()

    def _answer(self, service: str) -> bytes:
        status = _Status.SERVICE_UNKNOWN
        if service in self._is_serving:
            status = _Status.SERVING if self._is_serving[service] else _Status.NOT_SERVING
        answer: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
        return answer


def service_of(body: object) -> str:
    """Return the name of the service in a message. Raises InvalidRequestError."""
    if not isinstance(body, bytes) or len(body) > _MAX_REQUEST_BYTES:
        raise InvalidRequestError(
            f"Expected a HealthCheckRequest of at most {_MAX_REQUEST_BYTES} bytes."
        )
    try:
        service: str = health_pb2.HealthCheckRequest.FromString(body).service
    except DecodeError as error:
        raise InvalidRequestError("The message is not a valid HealthCheckRequest.") from error
    return service
