"""Prompts with a cache salt of their own each."""

from __future__ import annotations

import json
import secrets

from tests.hostile.engine_work import EngineWork
from tests.hostile.floods.post_flood import PostFlood

__all__ = ["CacheSalts"]

_PROMPT = tuple(300 + place % 600 for place in range(64))
_STEP_TOKENS = 16
"""Each prompt is computed, as any that is valid; this bounds what a step adds to a token's time."""
_SALT = "s" * 256


class CacheSalts(PostFlood):
    """Their blocks are cached and never found again, so that they push others out."""

    name = "a cache salt for each prompt"
    arguments = (f"--max-num-batched-tokens={_STEP_TOKENS}",)
    engine_work = EngineWork(prompt=_PROMPT, max_tokens=1, max_num_batched_tokens=_STEP_TOKENS)
    allowed = frozenset(("200", "429"))

    def body(self) -> bytes:
        """Return a request whose salt is to be replaced."""
        body = {
            "model": "tiny-llama",
            "prompt": _PROMPT,
            "max_tokens": 1,
            "cache_salt": _SALT,
        }
        return json.dumps(body, separators=(",", ":")).encode()

    def next_body(self, body: bytes) -> bytes:
        """Return the request with another salt of the greatest length."""
        return body.replace(_SALT.encode(), secrets.token_hex(128).encode())
