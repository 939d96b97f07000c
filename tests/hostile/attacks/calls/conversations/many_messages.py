"""Conversations of more messages than the context has tokens."""

from __future__ import annotations

from tests.hostile.floods.post_flood import PostFlood

__all__ = ["ManyMessages"]

_NUM_MESSAGES = 4096


class ManyMessages(PostFlood):
    """Objects, which take more time to validate than other JSON."""

    name = "4096 messages"
    path = "/v1/chat/completions"

    def body(self) -> bytes:
        """Return a chat request."""
        messages = b",".join([b'{"role":"user","content":"x"}'] * _NUM_MESSAGES)
        return b'{"model":"tiny-llama","messages":[%b]}' % messages
