"""Samplers, starts and logits of the tests, and the definition that draws must follow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagedray.batch import SequenceStart, pack_token_ids
from pagedray.sampling_params import SamplingParams
from workers.sampler import Sampler
from workers.sampling.choice import Choice

CPU = torch.device("cpu")
VOCAB_SIZE = 300
NUM_ROWS = 16
GREEDY = SamplingParams(temperature=0.0)
EVERYTHING = SamplingParams(
    max_tokens=100,
    temperature=1.2,
    top_k=80,
    top_p=0.97,
    min_p=0.001,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={5: 4.0, 6: -4.0},
    min_tokens=4,
    stop_token_ids=[8, 9],
    logprobs=5,
)
MIXED = [
    GREEDY,
    SamplingParams(),
    EVERYTHING,
    SamplingParams(top_k=5),
    SamplingParams(temperature=0.0, frequency_penalty=1.0, logprobs=3),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0.0, logit_bias={3: 8.0}, min_tokens=2),
    SamplingParams(min_p=0.1, presence_penalty=-1.0),
]


def make_sampler(choice: Choice | None = None, vocab_size: int = VOCAB_SIZE) -> Sampler:
    return Sampler(max_num_rows=NUM_ROWS, vocab_size=vocab_size, device=CPU, choice=choice)


def make_start(
    sampling: SamplingParams,
    *,
    row: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    seed: int = 7,
    index: int = 0,
    eos: tuple[int, ...] = (),
) -> SequenceStart:
    return SequenceStart(
        row=row,
        token_ids=pack_token_ids([*prompt, *output]),
        num_prompt_tokens=len(prompt),
        block_ids=[],
        sampling=sampling,
        seed=seed,
        index=index,
        eos_token_ids=eos,
    )


def make_logits(
    num_rows: int = 1, *, vocab_size: int = VOCAB_SIZE, seed: int = 0, scale: float = 3.0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def sample_one(sampler: Sampler, logits: Tensor, *, row: int = 0, position: int = 3) -> int:
    """Return the token sampled for one row of logits `[vocab_size]`."""
    return int(sampler.sample(logits.clone().unsqueeze(0), [row], [position]).token_ids[0])


def draw_many(sampler: Sampler, logits: Tensor, num_draws: int) -> list[int]:
    """Return draws of row 0 from the same logits `[vocab_size]` at successive positions."""
    batch = min(num_draws, 2000)
    drawn: list[int] = []
    for first in range(0, num_draws, batch):
        positions = range(first, first + batch)
        repeated = logits.expand(batch, -1).clone()
        drawn += sampler.sample(repeated, [0] * batch, list(positions)).token_ids.tolist()
    return drawn


@dataclass(frozen=True)
class Reference:
    """The definition in plain float64: every token's probability, and sums with noise."""

    probabilities: np.ndarray
    scaled: np.ndarray
    """Scores over the temperature; -inf for the tokens that the filters drop."""

    @classmethod
    def of(cls, logits: np.ndarray, sampling: SamplingParams) -> Reference:
        scores = logits.astype(np.float64)
        ordered = np.array(sorted(range(len(scores)), key=lambda i: (-scores[i], i)))
        weights = np.exp((scores - scores.max()) / sampling.temperature)
        kept = ordered[weights[ordered] >= sampling.min_p]
        if sampling.top_k:
            kept = kept[: sampling.top_k]
        if sampling.top_p < 1.0:
            mass = weights[kept] / weights[kept].sum()
            before = np.concatenate(([0.0], np.cumsum(mass)[:-1]))
            kept = kept[before < sampling.top_p]
        probabilities = np.zeros(len(scores))
        probabilities[kept] = weights[kept] / weights[kept].sum()
        scaled = np.full(len(scores), -np.inf)
        scaled[kept] = scores[kept] / sampling.temperature
        return cls(probabilities, scaled)

    def tokens(self, noise: np.ndarray, slack: float) -> set[int]:
        """Return the token of the highest sum, and all others within the slack of it."""
        sums = self.scaled + noise
        return set(np.flatnonzero(sums >= sums.max() - slack).tolist())


def exact_noise(key: int, ids: Iterable[int]) -> np.ndarray:
    """Return the noise of tokens at a 64-bit key, in float64 and Python's integers."""
    words = [hashed_id(key % 2**64, token_id) >> 1 for token_id in ids]
    return exact_gumbel(np.array(words))


def hashed_id(key: int, token_id: int) -> int:
    """Return the 32 random bits of a token."""
    word = (token_id * 0x9E3779B9 + key) % 2**32
    word = (word ^ word >> 16) * 0x21F0AAAD % 2**32
    word = (word ^ word >> 15 ^ key >> 32) * 0xD35A2D97 % 2**32
    return word ^ word >> 15


def exact_gumbel(words: np.ndarray) -> np.ndarray:
    """Return the noise of 31 bits each in float64."""
    return -np.log(-np.log1p(-(words + 0.5) / 2**31))


def assert_fits(drawn: Sequence[int], probabilities: np.ndarray) -> None:
    """Fail if the draws are from another distribution: chi-square, 5 standard deviations."""
    counts = np.bincount(drawn, minlength=len(probabilities))
    assert not counts[probabilities == 0.0].any()
    expected = probabilities * len(drawn)
    # Rare tokens are taken together, so that the statistic is near its limit law.
    is_common = expected >= 10
    observed_cells = [*counts[is_common], counts[~is_common].sum()]
    expected_cells = [*expected[is_common], expected[~is_common].sum()]
    cells = [(o, e) for o, e in zip(observed_cells, expected_cells, strict=True) if e > 1e-9]
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    freedom = max(len(cells) - 1, 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5


def run_alone(choice: Choice | None, sampling: SamplingParams, logits: Tensor) -> list[int]:
    """Return the tokens of a sequence by itself; `logits` is `[num_steps, vocab_size]`."""
    sampler = make_sampler(choice)
    sampler.start(make_start(sampling, eos=(2,)))
    return [sample_one(sampler, row, position=3 + i) for i, row in enumerate(logits)]
