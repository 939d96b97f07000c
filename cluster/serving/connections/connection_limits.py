"""How many connections the frontends accept, so that descriptors are left for everything else."""

from __future__ import annotations

from dataclasses import dataclass

from pagedray.machine import descriptor_limit

__all__ = ["MAX_TOTAL", "ConnectionLimits", "connection_limits"]

MAX_TOTAL = 10_000
_RESERVE = 128
"""Descriptors for files, the connections to ranks, and the start of others in their place."""
_NUM_FRONTENDS = 2


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The open connections of one frontend."""

    total: int = MAX_TOTAL
    idle_s: float = 300.0
    """A gRPC connection without calls is closed after this time; its client connects again."""
    age_s: float = 3600.0
    """A gRPC connection takes no more calls after this time, give or take a tenth.

    Open calls end as if it did.
    """


def connection_limits() -> ConnectionLimits:
    """Return the limits of each frontend under the descriptor limit of this process."""
    available = max(descriptor_limit() - _RESERVE, descriptor_limit() // 4)
    total = max(2, min(MAX_TOTAL, available // _NUM_FRONTENDS))
    return ConnectionLimits(total)
