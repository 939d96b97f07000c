"""Addresses and features of the frontends of a replica."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.serving.http.request_checks import AllowedOrigins
from cluster.serving.inputs import CallOptions
from cluster.serving.responses.stored_responses import StoreLimits

__all__ = ["FrontendOptions"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrontendOptions:
    """The options of the frontends in one process."""

    host: str
    grpc_port: int | None
    """0 lets the system choose; None disables the frontend."""
    http_port: int | None
    """0 lets the system choose; None disables the frontend."""
    calls: CallOptions = field(default_factory=CallOptions)
    allowed_hosts: tuple[str, ...] = ()
    """Hosts for which HTTP answers without keys, besides IP addresses, `localhost` and `host`."""
    allowed_origins: AllowedOrigins | None = None
    """Origins of web pages that may use HTTP from a browser."""
    store_limits: StoreLimits | None = None
    """Limits on stored responses of /v1/responses; None stores none."""
