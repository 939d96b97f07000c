"""Valid streams of one tenant, two hundred at a time."""

from __future__ import annotations

from tests.hostile.engine_work import EngineWork
from tests.hostile.floods.http_flood import HttpFlood, completion_request

__all__ = ["ValidStreams"]

_PROMPT = "def read(path):"
_NUM_TOKENS = 64
_BODY = {
    "model": "tiny-llama",
    "prompt": _PROMPT,
    "max_tokens": _NUM_TOKENS,
    "ignore_eos": True,
    "stream": True,
}


class ValidStreams(HttpFlood):
    """As many as honest clients might send: what the engine computes for others is load."""

    name = "200 valid streams at once"
    num_connections = 200
    allowed = frozenset(("200", "429"))
    engine_work = EngineWork(prompt=_PROMPT, max_tokens=_NUM_TOKENS, fills_rows=True)

    def request(self, key: str | None) -> bytes:
        """Return a completion request."""
        return completion_request(_BODY, key)
