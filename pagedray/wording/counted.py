"""Writes numbers of things, such as `1 request` and `2 requests`, in messages."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1; the plural only adds an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
