"""Tenants, to whom requests are billed, and their limits."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ANONYMOUS", "Tenant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant; a limit of None is no limit."""

    name: str
    """Prefixes and request ids are separate for each name."""
    weight: float = 1.0
    """Its share of steps among tenants with waiting requests."""
    max_requests: int | None = None
    """Limit of open calls."""
    max_tokens: int | None = None
    """Limit of prompt tokens and tokens to generate of all open calls."""
    is_admin: bool = False
    """Whether it may see the data of all tenants."""


ANONYMOUS = Tenant(name="", is_admin=True)
"""The tenant of every call if no keys are required."""
