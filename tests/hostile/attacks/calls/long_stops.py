"""Requests for many sequences, each with the longest stop strings."""

from __future__ import annotations

import json

from tests.hostile.engine_work import EngineWork
from tests.hostile.floods.post_flood import PostFlood

__all__ = ["LongStops"]

_STOPS = ["a" * 495 + last for last in "bcdefghijklmnopq"]
_PROMPT = "x"
_NUM_SEQUENCES = 128
_NUM_TOKENS = 1


class LongStops(PostFlood):
    """8 KiB that would become 400 MiB if each sequence had tables of its own."""

    name = "16 long stop strings, 128 times"
    allowed = frozenset(("200", "429"))
    engine_work = EngineWork(prompt=_PROMPT, max_tokens=_NUM_TOKENS, num_prompts=_NUM_SEQUENCES)

    def body(self) -> bytes:
        """Return a completion request."""
        body = {
            "model": "tiny-llama",
            "prompt": _PROMPT,
            "n": _NUM_SEQUENCES,
            "max_tokens": _NUM_TOKENS,
            "stop": _STOPS,
        }
        return json.dumps(body).encode()
