"""Prompts of a million token ids, of which the context holds a thousand."""

from __future__ import annotations

from tests.hostile.floods.post_flood import PostFlood

__all__ = ["IdLists"]

_NUM_IDS = 1_000_000


class IdLists(PostFlood):
    """2 MB of JSON, two bytes for each integer."""

    name = "a million token ids"

    def body(self) -> bytes:
        """Return a completion request."""
        return b'{"model":"tiny-llama","prompt":[1%b]}' % (b",1" * (_NUM_IDS - 1))
