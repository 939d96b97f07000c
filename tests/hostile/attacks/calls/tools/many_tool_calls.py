"""Conversations with thousands of tool calls, each an object in JSON with JSON in a string."""

from __future__ import annotations

from tests.hostile.floods.post_flood import PostFlood

__all__ = ["ManyToolCalls"]

_NUM_CALLS = 60
_NUM_MESSAGES = 60


class ManyToolCalls(PostFlood):
    """The message that takes the most time for its bytes."""

    name = "3600 tool calls"
    path = "/v1/chat/completions"

    def body(self) -> bytes:
        """Return a chat request, whose last field is not supported."""
        function = b'{"name":"f","arguments":"{\\"a\\":1}"}'
        calls = b",".join([b'{"id":"a","type":"function","function":%b}' % function] * _NUM_CALLS)
        message = b'{"role":"assistant","content":"","tool_calls":[%b]}' % calls
        return b'{"model":"tiny-llama","max_tokens":0,"messages":[%b]}' % b",".join(
            [message] * _NUM_MESSAGES
        )
