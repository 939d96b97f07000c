"""Prompts with a cache salt of their own each."""

from __future__ import annotations

import json
import secrets

from tests.hostile.post_flood import PostFlood

__all__ = ["CacheSalts"]

_NUM_TOKENS = 64
_SALT = "s" * 256


class CacheSalts(PostFlood):
    """Their blocks are cached and never found again, so that they push others out."""

    name = "a cache salt for each prompt"
    # Each prompt is computed, as any that is valid; this bounds what a step adds to a token's time.
    arguments = ("--max-num-batched-tokens=16",)
    allowed = frozenset(("200", "429"))

    def body(self) -> bytes:
        """Return a request whose salt is to be replaced."""
        body = {
            "model": "tiny-llama",
            "prompt": [300 + place % 600 for place in range(_NUM_TOKENS)],
            "max_tokens": 1,
            "cache_salt": _SALT,
        }
        return json.dumps(body, separators=(",", ":")).encode()

    def next_body(self, body: bytes) -> bytes:
        """Return the request with another salt of the greatest length."""
        return body.replace(_SALT.encode(), secrets.token_hex(128).encode())
