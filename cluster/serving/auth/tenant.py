"""Tenants, to whom requests are billed, and their limits."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ANONYMOUS", "Tenant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant; a limit of None means that there is none."""

    name: str
    """Prefixes and request ids are separate for each name."""
    weight: float = 1.0
    """The tenant's share of steps, relative to other tenants with waiting requests."""
    max_requests: int | None = None
    """Maximum number of open calls."""
    max_tokens: int | None = None
    """Limit of prompt tokens and tokens to generate of all open calls."""
    is_admin: bool = False
    """Whether it may see the data of all tenants."""


ANONYMOUS = Tenant(name="", is_admin=True)
"""The tenant of every call if no keys are required."""
