"""Authentication and admission of calls, before their messages are received."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from cluster.serving.inputs import Arrival
from cluster.serving.rpc.call import RpcCall
from cluster.serving.rpc.context import Context, abort_call, metadata_of
from cluster.serving.rpc.health import HEALTH
from cluster.serving.rpc.service import OPERATIONS, SERVICE
from pagedray.errors import PagedRayError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cluster.serving.inputs import Operation
    from cluster.serving.servicer import Servicer

__all__ = ["EntryInterceptor", "admit_call"]

_OPEN_PREFIX = f"/{HEALTH}/"
_PREFIX = f"/{SERVICE.full_name}/"


# The class is generic only in grpc's stubs.
class EntryInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # see above
    """Rejects calls without a valid key, except health checks, and calls the queue has no room for.

    A method that does not exist needs a key too.
    """

    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the method's handler, or one that rejects the call."""
        method = handler_call_details.method
        if not method.startswith(_OPEN_PREFIX):
            call = RpcCall(metadata=metadata_of(handler_call_details.invocation_metadata))
            try:
                admit_call(self._servicer, call, OPERATIONS.get(method.removeprefix(_PREFIX)))
            except PagedRayError as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def admit_call(servicer: Servicer, call: RpcCall, operation: Operation | None) -> None:
    """Raise AuthenticationError, or OverloadedError if the queue has no room for the call."""
    with servicer.metrics.counting_refusals(call.frontend):
        tenant = servicer.authenticate(call.authorization)
    is_continued = call.continuation is not None and bool(call.continuation.sequences)
    if operation is not None and not is_continued:
        servicer.check_room(Arrival(operation=operation, tenant=tenant.name, origin=call.origin))


def _refusal(error: PagedRayError) -> grpc.RpcMethodHandler[Any, Any]:
    async def handle(_requests: object, context: Context) -> None:
        await abort_call(context, error)

    # A streaming handler is called before any message is read.
    return grpc.stream_stream_rpc_method_handler(handle)
