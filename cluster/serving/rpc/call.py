"""The metadata, deadline and origin of a gRPC call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cluster.serving.calls.open_calls import OpenCall
from cluster.serving.continuation import Continuation
from cluster.serving.inputs import CallOrigin, Frontend

__all__ = ["AUTHORIZATION", "RpcCall"]

AUTHORIZATION = "authorization"
"""The metadata key of the API key."""


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
