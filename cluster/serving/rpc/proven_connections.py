"""Which gRPC connections have brought a call with a valid key, or any call if there are no keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import grpc

from cluster.serving.rpc.call import AUTHORIZATION
from cluster.serving.rpc.context import Context, metadata_of
from cluster.serving.rpc.service import SERVICE
from pagedray.errors import PagedRayError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from cluster.serving.servicer import Servicer

__all__ = ["ProofInterceptor", "ProvenConnections", "peer_name"]

_PREFIX = f"/{SERVICE.full_name}/"


def peer_name(host: str, port: int) -> str:
    """Return a client's address as gRPC writes it."""
    return f"ipv6:{quote(f'[{host}]', safe=':')}:{port}" if ":" in host else f"ipv4:{host}:{port}"


class ProvenConnections:
    """The connections that have brought a valid call, by peer name. Read from any thread."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._closed: set[str] = set()
        """Names that were not open when `forget_closed` was last called."""

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        """Note that a connection has brought a valid call."""
        self._names.add(name)

    def forget_closed(self, open_names: Collection[str]) -> None:
        """Forget closed connections; a connection may be noted shortly before it is seen open."""
        closed = {name for name in tuple(self._names) if name not in open_names}
        self._names -= closed & self._closed
        self._closed = closed


# The class is generic only in grpc's stubs.
class ProofInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # see above
    """Notes the connections of valid calls when their handlers start."""

    def __init__(self, servicer: Servicer, proven: ProvenConnections) -> None:
        self._servicer = servicer
        self._proven = proven

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the method's handler, which then notes its connection."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_PREFIX):
            return handler
        return self._noting(handler)

    def _noting(self, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:  # Any: a named tuple
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        (kind,) = (kind for kind in kinds if getattr(handler, kind) is not None)
        handle = getattr(handler, kind)

        async def note_and_handle(request: object, context: Context) -> object:
            peer = context.peer()
            if peer not in self._proven and self._is_valid(context):
                self._proven.add(peer)
            return await handle(request, context)

        replaced: grpc.RpcMethodHandler[Any, Any] = handler._replace(**{kind: note_and_handle})
        return replaced

    def _is_valid(self, context: Context) -> bool:
        metadata = metadata_of(context.invocation_metadata())
        try:
            self._servicer.authenticate(metadata.get(AUTHORIZATION))
        except PagedRayError:
            return False
        return True
