"""Conversations in Anthropic's format of thousands of content blocks."""

from __future__ import annotations

from tests.hostile.floods.post_flood import PostFlood

__all__ = ["ManyBlocks"]

_NUM_BLOCKS = 8000


class ManyBlocks(PostFlood):
    """As many objects as a body may have, in the field whose blocks may only be texts."""

    name = "8000 blocks of a system prompt"
    path = "/v1/messages"

    def body(self) -> bytes:
        """Return a request whose text is longer than the context."""
        blocks = b",".join([b'{"type":"text","text":"x "}'] * _NUM_BLOCKS)
        return (
            b'{"model":"tiny-llama","max_tokens":1,"messages":[{"role":"user","content":"x"}],'
            b'"system":[%b]}' % blocks
        )
