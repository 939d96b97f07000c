"""Log-probabilities are those of the raw logits."""

from __future__ import annotations

import pytest
import torch

from pagedray.batch import TokenLogprobs
from pagedray.sampling_params import SamplingParams
from tests.workers.sampling.sampler_rig import (
    EVERYTHING,
    GREEDY,
    VOCAB_SIZE,
    make_logits,
    make_start,
)
from workers.sampler import Sampler
from workers.sampling.choice import Choice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(sampler: Sampler, dtype: torch.dtype) -> None:
    logits = make_logits(3, seed=9).to(dtype)
    expected = torch.log_softmax(logits.double(), dim=-1)
    sampler.start(make_start(EVERYTHING, row=0))
    sampler.start(make_start(GREEDY, row=1))
    sampler.start(make_start(SamplingParams(temperature=0.5, logprobs=0), row=2))
    sampled = sampler.sample(logits, [0, 1, 2], [3, 3, 3])
    full, none, only_chosen = sampled.logprobs
    assert none is None
    assert isinstance(full, TokenLogprobs)
    assert isinstance(only_chosen, TokenLogprobs)
    likeliest = expected[0].sort(descending=True, stable=True)
    assert full.token_ids == likeliest.indices[:5].tolist()
    assert full.logprobs == pytest.approx(likeliest.values[:5].tolist(), abs=1e-5)
    chosen = sampled.token_ids.tolist()
    assert full.chosen == pytest.approx(float(expected[0, chosen[0]]), abs=1e-5)
    assert only_chosen.chosen == pytest.approx(float(expected[2, chosen[2]]), abs=1e-5)
    assert only_chosen.token_ids == []
    assert only_chosen.logprobs == []


@pytest.mark.parametrize("token_ids", [[7], [299, 0, 7], [5, 5, 4], [*range(20)]])
def test_logprobs_of_given_tokens_are_those_of_the_raw_logits(
    sampler: Sampler, token_ids: list[int]
) -> None:
    logits = make_logits(3, seed=9)
    expected = torch.log_softmax(logits.double(), dim=-1)
    chosen = SamplingParams(logprobs=2, logprob_token_ids=token_ids, logit_bias={7: -100.0})
    sampler.start(make_start(SamplingParams(logprobs=4), row=0))
    sampler.start(make_start(chosen, row=1))
    likeliest, given = sampler.sample(logits[:2].clone(), [0, 1], [3, 3]).logprobs
    assert isinstance(likeliest, TokenLogprobs)
    assert isinstance(given, TokenLogprobs)
    assert likeliest.token_ids == expected[0].topk(4).indices.tolist()
    assert given.token_ids == list(dict.fromkeys(token_ids))
    assert given.logprobs == pytest.approx(expected[1, given.token_ids].tolist(), abs=1e-5)
    # Another sequence in the row reports its most likely tokens again.
    sampler.start(make_start(SamplingParams(logprobs=2), row=1))
    (other,) = sampler.sample(logits[2:].clone(), [1], [3]).logprobs
    assert isinstance(other, TokenLogprobs)
    assert other.token_ids == expected[2].topk(2).indices.tolist()


def test_rows_report_different_numbers_of_given_tokens(sampler: Sampler) -> None:
    given = [(7, 8, 9), (4,), (5, 6)]
    for row, token_ids in enumerate(given):
        sampling = SamplingParams(logprobs=0, logprob_token_ids=token_ids)
        sampler.start(make_start(sampling, row=row))
    reports = sampler.sample(make_logits(3, seed=9), [0, 1, 2], [3, 3, 3]).logprobs
    assert [tuple(one.token_ids) for one in reports if one is not None] == given


def test_the_first_token_of_the_vocabulary_has_a_report(sampler: Sampler) -> None:
    logits = make_logits(1, seed=9)
    logits[0, 0] = 100.0
    sampler.start(make_start(SamplingParams(temperature=0.0, logprobs=1)))
    sampled = sampler.sample(logits, [0], [3])
    assert sampled.token_ids.tolist() == [0]
    (report,) = sampled.logprobs
    assert report is not None
    assert report.token_ids == [0]


@pytest.mark.parametrize("num_tokens", [1, 20, VOCAB_SIZE])
def test_top_tokens_break_ties_by_the_lower_id(choice: Choice, num_tokens: int) -> None:
    scores = (make_logits(5, seed=1) / 2).round()
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :num_tokens]
    assert choice.top_tokens(scores, num_tokens).tolist() == expected.tolist()


def test_ranks_take_both_zeros_for_one_score(choice: Choice) -> None:
    scores = torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.0]])
    assert choice.top_tokens(scores, 5).tolist() == [[1, 2, 3, 4, 0]]
