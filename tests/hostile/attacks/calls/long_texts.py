"""Long texts to tokenize, more at a time than wait in the queue."""

from __future__ import annotations

from tests.hostile.floods.post_flood import PostFlood

__all__ = ["LongTexts"]

_NUM_WORDS = 7000


class LongTexts(PostFlood):
    """Calls that use no engine, and that a thread computes."""

    name = "90 long texts"
    path = "/tokenize"
    num_connections = 90
    allowed = frozenset(("200", "429"))

    def body(self) -> bytes:
        """Return a request for the tokens of 35 kB."""
        return b'{"model":"tiny-llama","prompt":"%b"}' % (b"word " * _NUM_WORDS)
