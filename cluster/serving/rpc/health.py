"""`grpc.health.v1.Health` with bounds, since it answers clients without a key.

The library's own servicer stores any service name that a call watches, waits without limit for the
rest of a message, and answers an invalid message with a trace.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from cluster.serving.rpc.context import Context

__all__ = ["HEALTH", "Health"]

HEALTH: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_Status = health_pb2.HealthCheckResponse.ServingStatus
_MAX_REQUEST_BYTES = 256
_READ_TIMEOUT_S = 5.0
_MAX_OPEN_CALLS = 32
"""Open calls of one host, so that other hosts' probes are still answered."""
_PORT = re.compile(r":\d+$")


class Health:
    """The serving status of some services, for Check and Watch."""

    def __init__(self, services: Iterable[str], *, read_timeout_s: float = _READ_TIMEOUT_S) -> None:
        """Services start as NOT_SERVING. The empty name is the whole server.

        `read_timeout_s` limits how long a call's message may take to arrive.
        """
        self._read_timeout_s = read_timeout_s
        self._is_serving = dict.fromkeys(("", *services), False)
        self._changed = asyncio.Condition()
        self._num_open: Counter[str] = Counter()

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
            "Check": make(self._bounded(self._check)),
            "Watch": make(self._bounded(self._watch)),
        }
        return grpc.method_handlers_generic_handler(HEALTH, methods)

    def _bounded(
        self, answer: Callable[[str, Context], Awaitable[None]]
    ) -> Callable[[object, Context], Awaitable[None]]:
        async def handle(_requests: object, context: Context) -> None:
            with self._counted(_host_of(context)) as num_open:
                if num_open > _MAX_OPEN_CALLS:
                    text = f"A host may have at most {_MAX_OPEN_CALLS} open health calls."
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
                await answer(await _service(context, self._read_timeout_s), context)

        return handle

    @contextmanager
    def _counted(self, host: str) -> Iterator[int]:
        """Count an open call of a host; yield the host's number of open calls."""
        self._num_open[host] += 1
        try:
            yield self._num_open[host]
        finally:
            self._num_open[host] -= 1
            if not self._num_open[host]:
                del self._num_open[host]

    async def _check(self, service: str, context: Context) -> None:
        if service not in self._is_serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "Unknown service.")
        await context.write(self._answer(service))

    async def _watch(self, service: str, context: Context) -> None:
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


async def _service(context: Context, timeout_s: float) -> str:
    """Return the name of the requested service. Aborts the call if none arrives in time."""
    try:
        body = await asyncio.wait_for(context.read(), timeout_s)
    except TimeoutError:
        text = f"The request message did not arrive within {timeout_s:g} s."
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
    if not isinstance(body, bytes) or len(body) > _MAX_REQUEST_BYTES:
        text = f"Expected a HealthCheckRequest of at most {_MAX_REQUEST_BYTES} bytes."
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
    try:
        service: str = health_pb2.HealthCheckRequest.FromString(body).service
    except DecodeError:
        text = "The message is not a valid HealthCheckRequest."
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
    return service


def _host_of(context: Context) -> str:
    """Return a client's address without its port."""
    return _PORT.sub("", context.peer())
