"""Authentication and admission of calls, before their messages are received."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from cluster.serving.inputs import Arrival
from cluster.serving.rpc.call import AUTHORIZATION, Context, RpcCall, abort_call, metadata_of
from cluster.serving.rpc.health import HEALTH
from cluster.serving.rpc.service import COUNTED, OPERATIONS, SERVICE
from cluster.serving.rpc.status import field_of
from pagedray.errors import OverloadedError, PagedRayError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from cluster.serving.auth import Tenant
    from cluster.serving.inputs import Frontend
    from cluster.serving.open_calls import OpenCall
    from cluster.serving.servicer import Servicer

__all__ = ["EntryInterceptor", "enter_call", "log_rejection"]

_OPEN_PREFIX = f"/{HEALTH}/"
# Their handlers admit calls themselves.
_OPEN_METHODS = frozenset(f"/{SERVICE.full_name}/{method.name}" for method in SERVICE.methods)


# The class is generic only in grpc's stubs.
class EntryInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # see above
    """Rejects calls without a valid key to methods that do not check it themselves.

    These are reflection, and methods that do not exist.
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
        """Return the method's handler, or a handler that rejects the call."""
        method = handler_call_details.method
        if not (method in _OPEN_METHODS or method.startswith(_OPEN_PREFIX)):
            metadata = metadata_of(handler_call_details.invocation_metadata)
            try:
                with self._servicer.metrics.counting_rejections("grpc"):
                    self._servicer.authenticate(metadata.get(AUTHORIZATION))
            except PagedRayError as error:
                log_rejection(self._servicer, method, error)
                return _rejection(error)
        return await continuation(handler_call_details)


def enter_call(
    servicer: Servicer,
    metadata: Mapping[str, str],
    method: str,
    *,
    frontend: Frontend = "grpc",
    is_continued: bool = False,
) -> tuple[Tenant, OpenCall | None]:
    """Return the tenant of a call, and the call in the tenant's limits if it counts.

    Raises AuthenticationError, or OverloadedError if the tenant or the server has no room for it.
    """
    with servicer.metrics.counting_rejections(frontend):
        tenant = servicer.authenticate(metadata.get(AUTHORIZATION))
    if method not in COUNTED:
        return tenant, None
    operation = OPERATIONS.get(method)
    try:
        entered = servicer.enter_call(
            tenant, uses_engine=operation is not None, is_continued=is_continued
        )
    except OverloadedError as error:
        arrival = None
        if operation is not None:
            origin = RpcCall(frontend=frontend, metadata=metadata).origin
            arrival = Arrival(operation=operation, tenant=tenant.name, origin=origin)
        servicer.note_rejected(error, arrival, frontend)
        raise
    return tenant, entered


def log_rejection(
    servicer: Servicer, method: str, error: Exception, *, frontend: Frontend = "grpc"
) -> None:
    """Log a call that is rejected; `method` is the path, or the name of one of our methods."""
    # gRPC's own errors, and defects, are logged elsewhere.
    if not isinstance(error, PagedRayError):
        return
    path = method if method.startswith("/") else f"/{SERVICE.full_name}/{method}"
    servicer.rejected_calls.note(
        frontend,
        status=error.grpc_status,
        method=path.rpartition("/")[2],
        path=path,
        param=field_of(error),
        error=str(error),
    )


def _rejection(error: PagedRayError) -> grpc.RpcMethodHandler[Any, Any]:
    async def handle(_requests: object, context: Context) -> None:
        await abort_call(context, error)

    # A streaming handler is called before any message is read.
    return grpc.stream_stream_rpc_method_handler(handle)
