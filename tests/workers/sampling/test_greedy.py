"""Greedy choice, whatever the dtype and the filters."""

from __future__ import annotations

import pytest
import torch

from pagedray.sampling_params import SamplingParams
from tests.workers.sampling.sampler_rig import (
    GREEDY,
    VOCAB_SIZE,
    make_logits,
    make_start,
    sample_one,
)
from workers.sampler import Sampler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_greedy_is_argmax(sampler: Sampler, dtype: torch.dtype, num_rows: int) -> None:
    for row in range(num_rows):
        sampler.start(make_start(GREEDY, row=row))
    logits = make_logits(num_rows).to(dtype)
    expected = logits.float().numpy().argmax(-1).tolist()
    sampled = sampler.sample(logits, list(range(num_rows)), [3] * num_rows)
    assert sampled.token_ids.dtype == torch.int64
    assert sampled.token_ids.tolist() == expected
    assert sampled.logprobs == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_of_equal_tokens(sampler: Sampler, dtype: torch.dtype) -> None:
    sampler.start(make_start(GREEDY))
    logits = torch.full((VOCAB_SIZE,), -5.0, dtype=dtype)
    logits[[17, 40, 299]] = -1.0
    assert sample_one(sampler, logits) == 17
    zeros = torch.full((VOCAB_SIZE,), -5.0, dtype=dtype)
    zeros[9], zeros[10] = -0.0, 0.0
    assert sample_one(sampler, zeros) == 9


def test_logits_beyond_the_vocabulary_are_ignored(sampler: Sampler) -> None:
    plain = SamplingParams(temperature=1.0)
    sampler.start(make_start(GREEDY, row=0))
    sampler.start(make_start(plain, row=1))
    sampler.start(make_start(SamplingParams(top_k=5, top_p=0.9, logprobs=2), row=2))
    logits = make_logits(3)
    wide = torch.cat((logits, torch.full((3, 20), 1e9)), dim=1)
    expected = sampler.sample(logits.clone(), [0, 1, 2], [3, 3, 3])
    sampled = sampler.sample(wide, [0, 1, 2], [3, 3, 3])
    assert sampled.token_ids.tolist() == expected.token_ids.tolist()
    assert sampled.logprobs == expected.logprobs


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=100.0, top_k=1),
        SamplingParams(temperature=100.0, top_p=1e-9),
        SamplingParams(temperature=100.0, min_p=1.0, top_k=1),
    ],
    ids=["top_k", "top_p", "both"],
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_narrowest_filter_equals_greedy(
    sampler: Sampler, sampling: SamplingParams, is_tied: bool
) -> None:
    logits = make_logits(seed=3)[0]
    if is_tied:
        logits = (logits / 4).round()
    sampler.start(make_start(sampling))
    assert {sample_one(sampler, logits, position=p) for p in range(50)} == {int(logits.argmax())}
