"""The context, metadata, deadline and origin of a gRPC call, and its end with an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from cluster.serving.continuation import Continuation
from cluster.serving.inputs import CallOrigin, Frontend
from cluster.serving.open_calls import OpenCall
from cluster.serving.rpc.status import DETAILS_KEY, code_of, status_of

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["AUTHORIZATION", "Context", "RpcCall", "abort_call", "drop_frames", "metadata_of"]

AUTHORIZATION = "authorization"
"""The metadata key of the API key."""

# grpc's own stubs leave the context's message types open.
Context = grpc.aio.ServicerContext[Any, Any]


def _never(callback: Callable[[], None]) -> None:
    """Ignore a callback, for callers that cannot report the end of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcCall:
    """One call, from our own server or from Ray Serve's proxy."""

    frontend: Frontend = "grpc"
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Keys are in lower case."""
    remaining_s: float | None = None
    """Time until the deadline; None without a deadline."""
    add_done_callback: Callable[[Callable[[], None]], None] = _never
    """Registers a callback for the end of the call, also if it is cancelled during a write."""
    continuation: Continuation | None = None
    """Keeps the call the same in another replica; from the proxy in front of this replica."""
    entered: OpenCall | None = None
    """The call in its tenant's limits, if its method counts and its message has been received."""
    num_bytes: int = 0
    """The size of its message."""

    @property
    def authorization(self) -> str | None:
        """The credentials as sent, such as `Bearer KEY`."""
        return self.metadata.get(AUTHORIZATION)

    @property
    def origin(self) -> CallOrigin:
        """The frontend and the trace of the call."""
        return CallOrigin(
            frontend=self.frontend,
            traceparent=self.metadata.get("traceparent"),
            tracestate=self.metadata.get("tracestate"),
        )


def metadata_of(entries: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Return the text entries of a call's metadata; values of one key are joined."""
    metadata: dict[str, str] = {}
    for key, value in entries or ():
        if isinstance(value, str):
            # As in HTTP. Two API keys then form an invalid key.
            metadata[key] = f"{metadata[key]}, {value}" if key in metadata else value
    return metadata


async def abort_call(context: Context, error: Exception) -> NoReturn:
    """End a call with the status and details of an error."""
    if isinstance(error, grpc.aio.AbortError | grpc.aio.BaseError | grpc.RpcError):
        raise error
    status = status_of(error)
    drop_frames(error)
    await context.abort(
        code_of(status), status.message, ((DETAILS_KEY, status.SerializeToString()),)
    )
    raise AssertionError("abort raises an error")


def drop_frames(error: BaseException) -> None:
    """Free the variables in the frames of an error and of its causes.

    gRPC keeps the error of an aborted call in a reference cycle, so the call's message would stay
    in memory until a garbage collection.
    """
    waiting: BaseException | None = error
    while waiting is not None:
        waiting.__traceback__ = None
        waiting = waiting.__context__
