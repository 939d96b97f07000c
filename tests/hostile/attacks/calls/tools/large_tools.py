"""Lists of tools with thousands of texts, each of which may contain a special token."""

from __future__ import annotations

import json

from tests.hostile.floods.post_flood import PostFlood

__all__ = ["LargeTools"]

_NUM_TOOLS = 60
_NUM_PARAMETERS = 128


class LargeTools(PostFlood):
    """Fewer tools than other limits allow, beside one that must be called."""

    name = "60 tools of 128 parameters"
    path = "/v1/chat/completions"
    allowed = frozenset(("200", "429"))

    def body(self) -> bytes:
        """Return a chat request."""
        properties = {f"<{number}>": {"type": "string"} for number in range(_NUM_PARAMETERS)}
        parameters = {"type": "object", "properties": properties}
        tools = [
            {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}
            for number in range(1, _NUM_TOOLS)
        ]
        tools.append({"type": "function", "function": {"name": "f0"}})
        body = {
            "model": "tiny-llama",
            "messages": [{"role": "user", "content": "x"}],
            "tools": tools,
            "tool_choice": {"type": "function", "function": {"name": "f0"}},
            "max_tokens": 1,
        }
        return json.dumps(body, separators=(",", ":")).encode()
