"""Whom requests are billed to, and what they may use."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ANONYMOUS", "Tenant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant; None is no limit of its own."""

    name: str
    """What prefixes, request ids and the share of steps are kept apart by."""
    weight: float = 1.0
    """Its share of steps beside other tenants that also have requests waiting."""
    max_requests: int | None = None
    """Calls that may be open at once."""
    max_tokens: int | None = None
    """Prompt tokens and tokens to generate of its open calls together."""
    is_admin: bool = False
    """Whether it may see what concerns all tenants."""


ANONYMOUS = Tenant(name="", is_admin=True)
"""The tenant of every call where no keys are asked for."""
