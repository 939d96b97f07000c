"""Requests of token ids whose prompts and outputs have chosen lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.engine.shapes import SHAPES

__all__ = ["MAX_TOKEN_ID", "WORKLOADS", "Lengths", "Workload"]

MAX_TOKEN_ID = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths from a lognormal distribution, cut off at both ends."""

    log_mean: float
    log_deviation: float
    lowest: int
    highest: int

    def draw(self, chance: random.Random) -> int:
        """Return a random length."""
        length = round(chance.lognormvariate(self.log_mean, self.log_deviation))
        return min(max(length, self.lowest), self.highest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that are submitted at once."""

    name: str
    num_requests: int
    num_prompt_tokens: int | Lengths
    """After the prefix."""
    num_new_tokens: int | Lengths
    temperature: float = 0.0
    num_prefixes: int = 1
    num_prefix_tokens: int = 0
    """Of each of these prefixes, which requests have in turn."""

    def prompts(self, chance: random.Random) -> list[list[int]]:
        """Return random prompts of `lengths`, with their prefixes before them."""

        def token_ids(number: int) -> list[int]:
            return [chance.randrange(2, MAX_TOKEN_ID) for _ in range(number)]

        prefixes = [token_ids(self.num_prefix_tokens) for _ in range(self.num_prefixes)]
        return [
            prefixes[index % self.num_prefixes] + token_ids(size)
            for index, (size, _) in enumerate(self.lengths())
        ]

    def lengths(self) -> list[tuple[int, int]]:
        """Return prompt tokens and new tokens of each request, the same in every call."""
        chance = random.Random(4)
        return [
            (_length(self.num_prompt_tokens, chance), _length(self.num_new_tokens, chance))
            for _ in range(self.num_requests)
        ]

    def figure(self, seconds: float) -> float:
        """Return milliseconds per token for `latency`, otherwise tokens per second."""
        num_new_tokens = sum(new for _, new in self.lengths())
        if self.name == "latency":
            return seconds / num_new_tokens * 1e3
        if self.name == "prefill":
            return sum(prompt for prompt, _ in self.lengths()) / seconds
        return num_new_tokens / seconds


def _length(length: int | Lengths, chance: random.Random) -> int:
    return length if isinstance(length, int) else length.draw(chance)


_LARGE_WORKLOADS = (
    Workload(name="latency", num_requests=1, num_prompt_tokens=128, num_new_tokens=256),
    Workload(name="throughput", num_requests=64, num_prompt_tokens=128, num_new_tokens=256),
    Workload(name="throughput", num_requests=256, num_prompt_tokens=128, num_new_tokens=512),
    Workload(
        name="mixed",
        num_requests=1000,
        num_prompt_tokens=Lengths(log_mean=5.0, log_deviation=1.1, lowest=4, highest=2048),
        num_new_tokens=Lengths(log_mean=5.2, log_deviation=0.9, lowest=4, highest=1024),
    ),
    Workload(name="prefill", num_requests=32, num_prompt_tokens=4096, num_new_tokens=1),
    Workload(
        name="sampled",
        num_requests=256,
        num_prompt_tokens=128,
        num_new_tokens=512,
        temperature=0.7,
    ),
    Workload(
        name="prefix",
        num_requests=512,
        num_prompt_tokens=64,
        num_new_tokens=64,
        num_prefixes=16,
        num_prefix_tokens=2048,
    ),
)
_SMALL_WORKLOADS = (
    Workload(name="latency", num_requests=1, num_prompt_tokens=32, num_new_tokens=32),
    Workload(name="throughput", num_requests=16, num_prompt_tokens=32, num_new_tokens=32),
    Workload(
        name="mixed",
        num_requests=32,
        num_prompt_tokens=Lengths(log_mean=3.0, log_deviation=1.1, lowest=4, highest=256),
        num_new_tokens=Lengths(log_mean=3.0, log_deviation=0.9, lowest=4, highest=64),
    ),
    Workload(name="prefill", num_requests=4, num_prompt_tokens=512, num_new_tokens=1),
    Workload(
        name="sampled", num_requests=16, num_prompt_tokens=32, num_new_tokens=32, temperature=0.7
    ),
    Workload(
        name="prefix",
        num_requests=16,
        num_prompt_tokens=16,
        num_new_tokens=16,
        num_prefixes=4,
        num_prefix_tokens=128,
    ),
)
WORKLOADS = {
    name: _SMALL_WORKLOADS if name.startswith("small") else _LARGE_WORKLOADS for name in SHAPES
}
