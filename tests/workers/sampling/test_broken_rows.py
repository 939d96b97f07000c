"""Rows whose logits are not finite, or allow nothing."""

from __future__ import annotations

import math

import pytest
import torch
from msgspec.structs import replace

from pagedray.sampling_params import SamplingParams
from tests.workers.sampling.sampler_rig import (
    MIXED,
    VOCAB_SIZE,
    make_logits,
    make_sampler,
    make_start,
    sample_one,
)
from workers.sampler import Sampler
from workers.sampling.choice import Choice
from workers.sampling.edits import num_mask_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("broken", ["nan", "-nan", "inf", "all -inf"])
@pytest.mark.parametrize("token_id", [0, 8, VOCAB_SIZE - 1])
def test_a_broken_row_gives_minus_one_and_disturbs_no_other(
    sampler: Sampler, dtype: torch.dtype, broken: str, token_id: int
) -> None:
    logits = make_logits(2 * len(MIXED), seed=6).to(dtype)
    rows, positions = list(range(2 * len(MIXED))), [3] * (2 * len(MIXED))
    kinds = [kind for kind in MIXED for _ in range(2)]
    values = {"nan": math.nan, "-nan": -math.nan, "inf": math.inf, "all -inf": -math.inf}
    for row, sampling in enumerate(kinds):
        sampler.start(make_start(sampling, row=row))
    expected = sampler.sample(logits.clone(), rows, positions)
    for row, sampling in enumerate(kinds):
        sampler.start(make_start(sampling, row=row))
    # Every other row breaks, one of each kind.
    logits[::2, slice(None) if broken == "all -inf" else token_id] = values[broken]
    sampled = sampler.sample(logits, rows, positions)
    assert sampled.token_ids[::2].tolist() == [-1] * len(MIXED)
    assert sampled.token_ids[1::2].tolist() == expected.token_ids[1::2].tolist()
    assert sampled.logprobs[1::2] == expected.logprobs[1::2]
    assert sampled.logprobs[::2] == [None] * len(MIXED)


def test_forbidding_every_token_gives_minus_one(choice: Choice) -> None:
    sampler = make_sampler(choice, vocab_size=2)
    sampler.start(make_start(SamplingParams(min_tokens=1, stop_token_ids=[1]), eos=(0,)))
    assert sample_one(sampler, torch.zeros(2)) == -1


def test_a_broken_step_counts_no_token(sampler: Sampler) -> None:
    sampling = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    sampler.start(make_start(sampling))
    sample_one(sampler, torch.full((VOCAB_SIZE,), math.nan))
    scores = torch.zeros(1, VOCAB_SIZE)
    sampler.sample(scores, [0], [4])
    assert not scores.any()


def test_a_mask_that_allows_nothing_gives_minus_one_and_counts_no_token(sampler: Sampler) -> None:
    sampling = SamplingParams(temperature=0.0, frequency_penalty=2.0, logprobs=1)
    sampler.start(replace(make_start(sampling), mask_start=0))
    size = num_mask_bytes(VOCAB_SIZE)
    sampled = sampler.sample(make_logits(), [0], [3], b"\x00" * size)
    assert (sampled.token_ids.tolist(), sampled.logprobs) == ([-1], [None])
    scores = torch.zeros(1, VOCAB_SIZE)
    sampler.sample(scores, [0], [3], b"\xff" * size)
    assert not scores.any()
