"""What the methods of the gRPC service know of a call beside its message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cluster.serving.inputs import CallOrigin, Frontend

__all__ = ["AUTHORIZATION", "RpcCall"]

AUTHORIZATION = "authorization"
"""The metadata key of a call's credentials."""


def _never(callback: Callable[[], None]) -> None:
    """Leave the end of a call unheard, where there is nobody who could tell it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcCall:
    """One call, whoever carries it: our own server, or the proxy of Ray Serve."""

    frontend: Frontend = "grpc"
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What the client sent beside its message; keys are in lower case."""
    remaining_s: float | None = None
    """Until the deadline of the call; None is without one."""
    add_done_callback: Callable[[Callable[[], None]], None] = _never
    """Has something run when the call ends, also by a cancel in the midst of a write."""

    @property
    def authorization(self) -> str | None:
        """The credentials as they were sent, such as `Bearer KEY`."""
        return self.metadata.get(AUTHORIZATION)

    @property
    def origin(self) -> CallOrigin:
        """Where it came in, and the trace that it is part of."""
        return CallOrigin(
            frontend=self.frontend,
            traceparent=self.metadata.get("traceparent"),
            tracestate=self.metadata.get("tracestate"),
        )
