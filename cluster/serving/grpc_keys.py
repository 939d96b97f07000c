"""Who may call: decided on the metadata of a call, before its message is received."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2

from cluster.serving.grpc_call import AUTHORIZATION
from cluster.serving.grpc_methods import Context, metadata_of, refuse
from pagedray.errors import PagedRayError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from cluster.serving.servicer import Servicer

__all__ = ["KeyInterceptor"]

_OPEN_PREFIX = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/"


# Only grpc's stubs know that the class is generic.
class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # see above
    """Lets nobody without a key call anything but health, methods that do not exist included."""

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
        if not handler_call_details.method.startswith(_OPEN_PREFIX):
            metadata = metadata_of(handler_call_details.invocation_metadata)
            try:
                with self._servicer.metrics.counting_refusals("grpc"):
                    self._servicer.authenticate(metadata.get(AUTHORIZATION))
            except PagedRayError as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: PagedRayError) -> grpc.RpcMethodHandler[Any, Any]:
    async def handle(_requests: object, context: Context) -> AsyncGenerator[bytes]:
        await refuse(context, error)
        yield b""

    # A handler of a stream is called before any message is read.
    return grpc.stream_stream_rpc_method_handler(handle)
