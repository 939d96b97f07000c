"""Counts of the bytes that calls take in memory, of each tenant and in total."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BufferLimits", "TenantBytes"]


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Limits of memory that all calls share."""

    total_bytes: int = 256 * 2**20
    """The limit for all calls together."""

    @property
    def tenant_bytes(self) -> int:
        """The limit for the calls of one tenant."""
        return self.total_bytes // 4

    @property
    def call_bytes(self) -> int:
        """The limit for one call."""
        return self.total_bytes // 32


class TenantBytes:
    """The bytes of a server's calls. Used from the event loop only."""

    def __init__(self, limits: BufferLimits) -> None:
        self.limits = limits
        self._by_tenant: dict[str, int] = {}
        self.num_bytes = 0
        """Number of bytes of all calls."""

    def held_by(self, tenant: str) -> int:
        """Return the bytes of a tenant's calls."""
        return self._by_tenant.get(tenant, 0)

    def full_scope(self, tenant: str, num_bytes: int) -> Literal["tenant", "server"] | None:
        """Return the owner of the limit that this many more bytes exceed; None if they fit."""
        if self.held_by(tenant) + num_bytes > self.limits.tenant_bytes:
            return "tenant"
        return "server" if self.num_bytes + num_bytes > self.limits.total_bytes else None

    def count(self, tenant: str, num_bytes: int) -> None:
        """Add bytes to the counts, or subtract them, regardless of the limits."""
        self.num_bytes += num_bytes
        held = self.held_by(tenant) + num_bytes
        if held:
            self._by_tenant[tenant] = held
        else:
            self._by_tenant.pop(tenant, None)
