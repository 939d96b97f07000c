"""Margins against the sampler that the server uses."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.chaos.requests import NUM_LOGPROBS, Spec, least_margin
from workers.sampling.choice import Draws
from workers.sampling.noise import generator_start, noise_keys
from workers.sampling.numpy_choice import NumpyChoice

VOCAB_SIZE = 64
PLACE, INDEX = 17, 2


def spec_of(**changes: object) -> Spec:
    given = {"name": "a", "prompt": "x", "max_tokens": 9, "seed": 5}
    return Spec(**given | changes)  # type: ignore[arg-type]  # fields of all types


def sampled(spec: Spec, scores: np.ndarray) -> int:
    starts = np.array([generator_start(spec.seed, INDEX)], dtype=np.uint64)
    draws = Draws(
        temperature=np.array([spec.temperature]),
        top_k=np.array([spec.top_k]),
        top_p=np.ones(1),
        min_p=np.zeros(1),
        key=noise_keys(starts, np.array([PLACE])),
    )
    row = torch.tensor(scores[None])
    return int(NumpyChoice().filtered(row, np.zeros(1, dtype=np.int64), draws)[0])


def top_of(scores: np.ndarray) -> tuple[tuple[int, float], ...]:
    order = np.argsort(-scores, kind="stable")[:NUM_LOGPROBS]
    return tuple((int(one), float(scores[one])) for one in order)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**31),
    top_k=st.integers(1, NUM_LOGPROBS - 1),
    temperature=st.floats(0.3, 1.5),
)
def test_a_smaller_change_than_the_margin_keeps_the_token(
    seed: int, top_k: int, temperature: float
) -> None:
    generator = np.random.default_rng(seed)
    spec = spec_of(top_k=top_k, temperature=temperature, seed=seed)
    scores = generator.normal(size=VOCAB_SIZE) * 3.0
    token_id = sampled(spec, scores)
    margin = least_margin(spec, INDEX, [token_id], [top_of(scores)], PLACE)
    assume(margin > 1e-3)
    change = 4e-4 * generator.uniform(-1.0, 1.0, size=VOCAB_SIZE)
    assert sampled(spec, scores + change) == token_id


def test_greedy_margin_is_the_distance_of_the_two_likeliest() -> None:
    scores = [((4, -0.5), (9, -0.75), (1, -3.0)), ((4, -0.5), (9, -0.625))]
    assert least_margin(spec_of(), 0, [4, 4], scores, 3) == pytest.approx(0.125)


def test_another_rule_than_the_servers_is_noticed() -> None:
    scores = top_of(np.linspace(0.0, 3.0, VOCAB_SIZE))
    spec = spec_of(top_k=2, temperature=1.0)
    with pytest.raises(AssertionError, match="how the server draws"):
        least_margin(spec, 0, [0], [scores], PLACE)
