"""Completions that return the log-probabilities of every token of their prompts."""

from __future__ import annotations

import json

from tests.hostile.engine_work import EngineWork
from tests.hostile.floods.post_flood import PostFlood

__all__ = ["PromptReports"]

_NUM_PROMPTS = 16
_NUM_TOKENS = 200
_NUM_LOGPROBS = 20
_STEP_TOKENS = 16
"""A step of 2 048 tokens takes a core a quarter of a second."""


def _prompt(number: int) -> tuple[int, ...]:
    return tuple(300 + (7 * number + place) % 600 for place in range(_NUM_TOKENS))


class PromptReports(PostFlood):
    """13 KB of token ids, for which the response has 130 000 entries."""

    name = "log-probabilities of prompts"
    arguments = (f"--max-num-batched-tokens={_STEP_TOKENS}",)
    allowed = frozenset(("200", "400", "429"))
    num_connections = 4
    # 64 MiB of a tenant's responses, and what is being written.
    max_growth_mib = 112.0
    engine_work = EngineWork(
        prompt=_prompt(0),
        max_tokens=1,
        num_prompts=_NUM_PROMPTS,
        num_prompt_logprobs=_NUM_LOGPROBS,
        max_num_batched_tokens=_STEP_TOKENS,
    )

    def body(self) -> bytes:
        """Return a request that generates nothing."""
        body = {
            "model": "tiny-llama",
            "prompt": [_prompt(number) for number in range(_NUM_PROMPTS)],
            "max_tokens": 0,
            "echo": True,
            "logprobs": _NUM_LOGPROBS,
            "prompt_logprobs": _NUM_LOGPROBS,
        }
        return json.dumps(body, separators=(",", ":")).encode()
