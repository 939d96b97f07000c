"""Valid calls of one tenant, two hundred at a time."""

from __future__ import annotations

from tests.hostile.engine_work import EngineWork
from tests.hostile.floods.http_flood import HttpFlood, completion_request

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
        return completion_request(_BODY, key)
