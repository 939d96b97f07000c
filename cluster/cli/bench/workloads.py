"""The requests of an engine's benchmark: token ids and numbers of tokens to generate."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from cluster.cli.bench.datasets import RandomLengths

__all__ = ["WORKLOADS", "EngineRequest", "Workload", "uniform_workload"]

_LEAST_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A prompt, and how many tokens to generate."""

    token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that are submitted at once."""

    num_requests: int
    draw_lengths: Callable[[random.Random], tuple[int, int]]
    """Returns the numbers of tokens of a prompt, and to generate."""
    num_prefixes: int = 1
    prefix_len: int = 0
    """Tokens of a prompt before the tokens of `draw_lengths`: one of `num_prefixes` prefixes."""

    def requests(self, vocab_size: int, seed: int) -> list[EngineRequest]:
        """Return the requests, equal for equal seeds."""
        lengths, tokens = random.Random(seed), random.Random(seed + 1)

        def token_ids(number: int) -> list[int]:
            return [tokens.randrange(vocab_size) for _ in range(number)]

        prefixes = [token_ids(self.prefix_len) for _ in range(self.num_prefixes)]
        requests = []
        for index in range(self.num_requests):
            num_prompt_tokens, max_tokens = self.draw_lengths(lengths)
            prompt = prefixes[index % self.num_prefixes] + token_ids(num_prompt_tokens)
            requests.append(EngineRequest(token_ids=prompt, max_tokens=max_tokens))
        return requests


def uniform_workload(
    num_requests: int, lengths: RandomLengths, *, num_prefixes: int = 1
) -> Workload:
    """Return requests of equal lengths, or of uniform lengths in a range."""
    return Workload(
        num_requests=num_requests,
        draw_lengths=lambda draws: (
            lengths.draw(lengths.input_len, draws),
            lengths.draw(lengths.output_len, draws),
        ),
        num_prefixes=num_prefixes,
        prefix_len=lengths.prefix_len,
    )


def _mixed_lengths(draws: random.Random) -> tuple[int, int]:
    return _lognormal(draws, 5.0, 1.1, 2048), _lognormal(draws, 5.2, 0.9, 1024)


def _lognormal(draws: random.Random, mean: float, deviation: float, most: int) -> int:
    """Return a length; `mean` and `deviation` describe its logarithm."""
    return min(max(round(draws.lognormvariate(mean, deviation)), _LEAST_TOKENS), most)


WORKLOADS = {
    "latency": uniform_workload(1, RandomLengths(input_len=128, output_len=256)),
    "decode": uniform_workload(256, RandomLengths(input_len=128, output_len=512)),
    "mixed": Workload(num_requests=1000, draw_lengths=_mixed_lengths),
    "prefill": uniform_workload(128, RandomLengths(input_len=4096, output_len=1)),
    "prefix": uniform_workload(
        512, RandomLengths(input_len=64, output_len=64, prefix_len=2048), num_prefixes=16
    ),
}
"""Workloads by their names for `--workload`; docs/load-tests.md describes them."""
