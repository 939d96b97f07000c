"""Valid calls of one tenant, two hundred at a time."""

from __future__ import annotations

import json

from tests.hostile.engine_work import EngineWork
from tests.hostile.floods.http_flood import HttpFlood

__all__ = ["ValidCalls"]

_PROMPT = "def read(path):"
_NUM_TOKENS = 1
_BODY = {"model": "tiny-llama", "prompt": _PROMPT, "max_tokens": _NUM_TOKENS}


class ValidCalls(HttpFlood):
    """Each takes the engine and the event loop about the same short time."""

    name = "200 valid calls at once"
    num_connections = 200
    allowed = frozenset(("200", "429"))
    engine_work = EngineWork(prompt=_PROMPT, max_tokens=_NUM_TOKENS)

    def request(self, key: str | None) -> bytes:
        """Return a completion request."""
        body = json.dumps(_BODY).encode()
        return (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b"
            % ((key or "").encode(), len(body), body)
        )
