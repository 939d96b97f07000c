"""Calls of OpenAI's Responses API, whose responses repeat the tools of the request."""

from __future__ import annotations

import json

from tests.hostile.engine_work import EngineWork
from tests.hostile.floods.http_flood import HttpFlood

__all__ = ["EchoedTools"]

_NUM_TOOLS = 60
_NUM_CHARACTERS = 32_000
_NUM_TOKENS = 900


class EchoedTools(HttpFlood):
    """Two megabytes that the model does not see, kept while the call waits for the engine."""

    name = "2 MB of tools to repeat"
    # 64 MiB of a tenant's bodies, as much of its responses, and of those that are stored, with what
    # the allocator keeps between them; the latter are still stored afterwards.
    max_growth_mib = 272.0
    max_left_mib = 112.0
    allowed = frozenset(("200", "400", "429"))
    engine_work = EngineWork(prompt="x", max_tokens=_NUM_TOKENS, fills_rows=True)

    def request(self, key: str | None) -> bytes:
        """Return a request whose call takes as long as possible."""
        description = "x" * _NUM_CHARACTERS
        body = {
            "model": "tiny-llama",
            "input": "x",
            "max_output_tokens": _NUM_TOKENS,
            "tools": [
                {"type": "function", "name": f"f{number}", "description": description}
                for number in range(_NUM_TOOLS)
            ],
            "tool_choice": "none",
            "stream": True,
        }
        raw = json.dumps(body).encode()
        return (
            b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b"
            % ((key or "").encode(), len(raw), raw)
        )
