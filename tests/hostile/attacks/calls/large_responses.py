"""Complete responses with the log-probabilities of many tokens."""

from __future__ import annotations

import json

from tests.hostile.engine_work import EngineWork
from tests.hostile.floods.http_flood import HttpFlood

__all__ = ["LargeResponses"]

_NUM_TOKENS = 100
_NUM_LOGPROBS = 20
_BODY = {
    "model": "tiny-llama",
    "messages": [{"role": "user", "content": "x"}],
    "n": 128,
    "max_tokens": _NUM_TOKENS,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": _NUM_LOGPROBS,
}


class LargeResponses(HttpFlood):
    """200 bytes of request for 20 MB of JSON."""

    name = "128 choices with log-probabilities"
    num_connections = 2
    # 64 MiB of a tenant's responses, and what is being written.
    max_growth_mib = 96.0
    allowed = frozenset(("200", "400", "429"))
    full_s = 15.0
    engine_work = EngineWork(
        prompt="x", max_tokens=_NUM_TOKENS, num_logprobs=_NUM_LOGPROBS, fills_rows=True
    )

    def request(self, key: str | None) -> bytes:
        """Return a chat request."""
        body = json.dumps(_BODY).encode()
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b"
            % ((key or "").encode(), len(body), body)
        )
