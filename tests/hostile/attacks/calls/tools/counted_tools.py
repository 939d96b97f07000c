"""Lists of tools with thousands of texts, to count their tokens."""

from __future__ import annotations

import json

from tests.hostile.floods.post_flood import PostFlood

__all__ = ["CountedTools"]

_NUM_TOOLS = 120
_NUM_PARAMETERS = 64


class CountedTools(PostFlood):
    """Calls that use no engine, hence are not limited by its queue."""

    name = "120 tools to count"
    path = "/v1/messages/count_tokens"
    allowed = frozenset(("200", "429"))

    def body(self) -> bytes:
        """Return a request."""
        properties = {f"<{number}>": {"type": "string"} for number in range(_NUM_PARAMETERS)}
        schema = {"type": "object", "properties": properties}
        body = {
            "model": "tiny-llama",
            "messages": [{"role": "user", "content": "x"}],
            "tools": [
                {"name": f"f{number}", "input_schema": schema} for number in range(_NUM_TOOLS)
            ],
            "tool_choice": {"type": "any"},
        }
        return json.dumps(body, separators=(",", ":")).encode()
