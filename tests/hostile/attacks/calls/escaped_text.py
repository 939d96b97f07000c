"""Texts of escapes, which take more time to parse than other bytes of JSON."""

from __future__ import annotations

from tests.hostile.floods.post_flood import PostFlood

__all__ = ["EscapedText"]

_NUM_CHARACTERS = 340_000


class EscapedText(PostFlood):
    """A string of two megabytes, which the parser reads in one call."""

    name = "2 MB of escapes"

    def body(self) -> bytes:
        """Return a completion request whose text is longer than the context."""
        return b'{"model":"tiny-llama","prompt":"%b"}' % (rb"\u20ac" * _NUM_CHARACTERS)
