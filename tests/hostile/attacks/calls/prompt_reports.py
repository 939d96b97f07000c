"""Completions that return the log-probabilities of every token of their prompts."""

from __future__ import annotations

import json

from tests.hostile.post_flood import PostFlood

__all__ = ["PromptReports"]

_NUM_PROMPTS = 16
_NUM_TOKENS = 200


class PromptReports(PostFlood):
    """13 KB of token ids, for which the response has 130 000 entries."""

    name = "log-probabilities of prompts"
    # A step of 2 048 tokens takes a core a quarter of a second.
    arguments = ("--max-num-batched-tokens=16",)
    allowed = frozenset(("200", "400", "429"))
    num_connections = 4
    # 64 MiB of a tenant's responses, and what is being written.
    max_growth_mib = 112.0

    def body(self) -> bytes:
        """Return a request that generates nothing."""
        prompts = [
            [300 + (7 * number + place) % 600 for place in range(_NUM_TOKENS)]
            for number in range(_NUM_PROMPTS)
        ]
        body = {
            "model": "tiny-llama",
            "prompt": prompts,
            "max_tokens": 0,
            "echo": True,
            "logprobs": 20,
            "prompt_logprobs": 20,
        }
        return json.dumps(body, separators=(",", ":")).encode()
