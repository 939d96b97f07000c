"""Inputs of OpenAI's Responses API of thousands of text parts."""

from __future__ import annotations

from tests.hostile.floods.post_flood import PostFlood

__all__ = ["ManyParts"]

_NUM_PARTS = 8000


class ManyParts(PostFlood):
    """As many objects as a body may have, in one message."""

    name = "8000 parts of a message"
    path = "/v1/responses"

    def body(self) -> bytes:
        """Return a request whose text is longer than the context."""
        parts = b",".join([b'{"type":"input_text","text":"x "}'] * _NUM_PARTS)
        return b'{"model":"tiny-llama","input":[{"role":"user","content":[%b]}]}' % parts
