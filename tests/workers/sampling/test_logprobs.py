"""Log-probabilities are those of the raw logits."""

import math

import pytest
import torch
from msgspec.structs import replace

from pagedray.batch import TokenLogprobs
from pagedray.sampling_params import SamplingParams
from tests.workers.sampling.sampler_rig import (
    EVERYTHING,
    GREEDY,
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
