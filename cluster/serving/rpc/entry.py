"""Who may call, and whether there is room: decided before the message of a call is received."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from cluster.serving.inputs import Arrival
from cluster.serving.rpc.call import RpcCall
from cluster.serving.rpc.health import HEALTH
from cluster.serving.rpc.methods import Context, metadata_of, refuse
from cluster.serving.rpc.service import OPERATIONS, SERVICE
from pagedray.errors import PagedRayError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cluster.serving.inputs import Operation
    from cluster.serving.servicer import Servicer

__all__ = ["EntryInterceptor"]

_OPEN_PREFIX = f"/{HEALTH}/"
_PREFIX = f"/{SERVICE.full_name}/"


# Only grpc's stubs know that the class is generic.
class EntryInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # see above
    """Lets nobody without a key call anything but health, methods that do not exist included.

    What the engine has no room for is refused here too, which is cheaper than to receive it.
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
        """Return the method's handler, or one that refuses."""
        method = handler_call_details.method
        if not method.startswith(_OPEN_PREFIX):
            call = RpcCall(metadata=metadata_of(handler_call_details.invocation_metadata))
            try:
                self._let_in(call, OPERATIONS.get(method.removeprefix(_PREFIX)))
            except PagedRayError as error:
                return _refusal(error)
        return await continuation(handler_call_details)

    def _let_in(self, call: RpcCall, operation: Operation | None) -> None:
        """Raise AuthenticationError, or OverloadedError if there is no room for the call."""
        with self._servicer.metrics.counting_refusals(call.frontend):
            tenant = self._servicer.authenticate(call.authorization)
        if operation is not None:
            self._servicer.check_room(
                Arrival(operation=operation, tenant=tenant.name, origin=call.origin)
            )


def _refusal(error: PagedRayError) -> grpc.RpcMethodHandler[Any, Any]:
    async def handle(_requests: object, context: Context) -> None:
        await refuse(context, error)

    # A handler of a stream is called before any message is read.
    return grpc.stream_stream_rpc_method_handler(handle)
