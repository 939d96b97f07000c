"""Draws follow the filtered distribution, and both choices agree with its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pagedray.sampling_params import SamplingParams
from tests.workers.sampling.sampler_rig import (
    GREEDY,
    VOCAB_SIZE,
    Reference,
    assert_fits,
    draw_many,
    make_logits,
    make_sampler,
    make_start,
    sample_one,
)
from workers.sampler import Sampler, generator_start, uniforms
from workers.sampling.choice import Choice, Draws
from workers.sampling.device_choice import TorchChoice
from workers.sampling.numpy_choice import NumpyChoice

FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.05),
    SamplingParams(top_k=40, top_p=0.9, min_p=0.02, temperature=1.3),
]
FILTER_NAMES = ["none", "temperature", "top_k", "top_p", "min_p", "all"]


@pytest.mark.parametrize("sampling", FILTERS, ids=FILTER_NAMES)
def test_draws_follow_the_filtered_distribution(sampler: Sampler, sampling: SamplingParams) -> None:
    sampler.start(make_start(sampling))
    logits = make_logits(seed=1)[0]
    drawn = draw_many(sampler, logits, 20_000)
    assert_fits(drawn, Reference.of(logits.numpy(), sampling).probabilities)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([1, 2, 127, 128, 129, 300, 1500]),
    scale=st.sampled_from([0.01, 1.0, 4.0, 30.0]),
    is_coarse=st.booleans(),
    temperature=st.sampled_from([0.3, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 1400, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 0.01]),
    min_p=st.sampled_from([0.0, 0.001, 0.2, 1.0]),
)
def test_both_choices_match_the_reference(
    seed: int,
    vocab_size: int,
    scale: float,
    is_coarse: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((8, vocab_size)) * scale).astype(np.float32)
    if is_coarse:
        # As with bfloat16, many scores are equal, also where a filter ends.
        logits = np.round(logits * 4).astype(np.float32) / np.float32(4)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, rng.integers(vocab_size)] = 0.0
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    uniform = uniforms(np.array([generator_start(seed, 0)] * 8, dtype=np.uint64), np.arange(8))
    # Where rounding may decide, either token will do.
    nearby = [
        replace(sampling, top_p=min(top_p * factor, 1.0)) for factor in (1 - 1e-6, 1.0, 1 + 1e-6)
    ]
    expected = [
        set().union(*(Reference.of(row, near).tokens(u, 2e-5) for near in nearby))
        for row, u in zip(logits, uniform, strict=True)
    ]
    for choice in (NumpyChoice(), TorchChoice()):
        sampler = make_sampler(choice, vocab_size)
        sampler.start(make_start(sampling, seed=seed))
        sampled = sampler.sample(torch.from_numpy(logits.copy()), [0] * 8, list(range(8)))
        for token_id, allowed in zip(sampled.token_ids.tolist(), expected, strict=True):
            assert token_id in allowed


def test_both_choices_agree_on_a_large_vocabulary() -> None:
    logits = make_logits(12, vocab_size=32_000, seed=5)
    kinds = [GREEDY, *FILTERS, SamplingParams(top_k=900), SamplingParams(top_k=2000)]
    kinds += [SamplingParams(top_p=0.999), SamplingParams(top_p=0.9, temperature=3.0)]
    kinds += [SamplingParams(top_p=0.5, min_p=0.001)]
    tokens = []
    for choice in (NumpyChoice(), TorchChoice()):
        sampler = make_sampler(choice, 32_000)
        for row, sampling in enumerate(kinds):
            sampler.start(make_start(sampling, row=row, seed=row))
        tokens.append(sampler.sample(logits.clone(), list(range(12)), [9] * 12).token_ids.tolist())
    assert tokens[0] == tokens[1]


def test_extreme_uniforms_never_choose_a_token_without_weight(choice: Choice) -> None:
    logits = torch.full((1, 400), -torch.inf)
    logits[0, [130, 131, 260]] = torch.tensor([1.0, 2.0, 1.0])
    for uniform in (0.0, 2.0**-53, 1 - 2.0**-53):
        draws = Draws(
            temperature=np.array([1.0]),
            top_k=np.array([400]),
            top_p=np.array([1.0]),
            min_p=np.array([0.0]),
            uniform=np.array([uniform]),
        )
        first = uniform < 0.5
        unfiltered = choice.unfiltered(logits, np.arange(1), draws)
        filtered = choice.filtered(logits, np.arange(1), draws)
        assert unfiltered.tolist() == [130 if first else 260]
        assert filtered.tolist() == [131 if first else 260]


@pytest.mark.parametrize("sampling", FILTERS, ids=FILTER_NAMES)
def test_minus_infinity_is_never_chosen(sampler: Sampler, sampling: SamplingParams) -> None:
    sampler.start(make_start(sampling))
    logits = torch.full((VOCAB_SIZE,), -torch.inf)
    logits[[5, 250]] = 0.0
    assert set(draw_many(sampler, logits, 200)) == {5, 250}


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_the_lowest_temperatures_take_the_likeliest(sampler: Sampler, temperature: float) -> None:
    logits = make_logits()[0]
    sampler.start(make_start(SamplingParams(temperature=temperature), row=0))
    sampler.start(make_start(SamplingParams(temperature=temperature, top_p=0.9), row=1))
    for row in (0, 1):
        assert sample_one(sampler, logits, row=row) == int(logits.argmax())


@pytest.mark.parametrize(
    ("sampling", "warper"),
    [
        (SamplingParams(temperature=1.5, top_k=9), TopKLogitsWarper(top_k=9)),
        (SamplingParams(temperature=1.5, top_p=0.7), TopPLogitsWarper(top_p=0.7)),
        (SamplingParams(temperature=1.5, min_p=0.03), MinPLogitsWarper(min_p=0.03)),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_filters_keep_what_transformers_keeps(
    sampler: Sampler, sampling: SamplingParams, warper: TopKLogitsWarper
) -> None:
    # A near flat row, so that every kept token is drawn.
    logits = make_logits(seed=8, scale=2.0)[:, :60]
    logits = torch.cat((logits, torch.full((1, VOCAB_SIZE - 60), -50.0)), dim=1)
    warmed = TemperatureLogitsWarper(1.5)(torch.tensor([[0]]), logits)
    kept = warper(torch.tensor([[0]]), warmed)
    expected = torch.softmax(kept.double(), dim=-1)[0].numpy()
    sampler.start(make_start(sampling))
    drawn = draw_many(sampler, logits[0], 10_000)
    assert set(drawn) == set(np.flatnonzero(expected > 1e-4).tolist())
    assert_fits(drawn, expected)
