"""The choice by Triton kernels gives the tokens of the choice in NumPy, for every filter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from workers.sampling.choice import Draws
from workers.sampling.numpy_choice import NumpyChoice
from workers.sampling.triton_choice import TritonChoice

NUM_ROWS = 6
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_scores(
    num_rows: int, vocab_size: int, *, seed: int, scale: float, is_coarse: bool
) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    scores = (rng.standard_normal((num_rows, vocab_size)) * scale).astype(np.float32)
    if is_coarse:
        # Many scores are equal, also where a filter ends.
        scores = np.round(scores * 4).astype(np.float32) / np.float32(4)
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    scores[:, rng.integers(vocab_size)] = 0.0
    return torch.from_numpy(scores)


def make_draws(num_rows: int, vocab_size: int, seed: int) -> Draws:
    rng = np.random.default_rng(seed)
    return Draws(
        temperature=rng.choice([0.3, 1.0, 2.5, 100.0], num_rows),
        top_k=np.minimum(rng.choice([vocab_size, vocab_size, 1, 3, 50], num_rows), vocab_size),
        top_p=rng.choice([1.0, 0.999, 0.9, 0.3, 0.01], num_rows),
        min_p=rng.choice([0.0, 0.0, 0.001, 0.2, 1.0], num_rows),
        uniform=rng.random(num_rows),
    )


@pytest.mark.parametrize("capacity", [4, 4096])
@pytest.mark.parametrize(
    ("vocab_size", "scale", "is_coarse"),
    [(1, 1.0, False), (129, 4.0, True), (300, 1.0, False), (1500, 30.0, True), (1500, 0.01, False)],
)
def test_tokens_are_those_of_the_cpu(
    vocab_size: int, scale: float, is_coarse: bool, capacity: int, device: torch.device
) -> None:
    scores = make_scores(NUM_ROWS, vocab_size, seed=vocab_size, scale=scale, is_coarse=is_coarse)
    draws, indices = make_draws(NUM_ROWS - 1, vocab_size, seed=1), np.arange(1, NUM_ROWS)
    ours, theirs, moved = TritonChoice(capacity=capacity), NumpyChoice(), scores.to(device)
    assert ours.greedy(moved, indices).tolist() == theirs.greedy(scores, indices).tolist()
    expected = theirs.unfiltered(scores, indices, draws)
    assert ours.unfiltered(moved, indices, draws).tolist() == expected.tolist()
    expected = theirs.filtered(scores, indices, draws)
    assert ours.filtered(moved, indices, draws).tolist() == expected.tolist()


@pytest.mark.parametrize("broken", [math.nan, -math.nan, math.inf])
def test_a_broken_row_gives_minus_one(broken: float, device: torch.device) -> None:
    scores = make_scores(3, 100, seed=0, scale=1.0, is_coarse=False)
    scores[0, 70] = broken
    scores[1] = -math.inf
    draws, indices, choice = make_draws(3, 100, seed=0), np.arange(3), TritonChoice()
    scores = scores.to(device)
    for token_ids in (
        choice.greedy(scores, indices),
        choice.unfiltered(scores, indices, draws),
        choice.filtered(scores, indices, draws),
    ):
        assert token_ids[:2].tolist() == [-1, -1]
        assert token_ids[2] >= 0


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.3, 1.3, 4.0])
@pytest.mark.parametrize("capacity", [64, 4096])
def test_tokens_of_a_large_vocabulary_are_those_of_the_cpu(
    dtype: torch.dtype, scale: float, capacity: int
) -> None:
    num_rows, vocab_size = 128, 128256
    scores = make_scores(num_rows, vocab_size, seed=3, scale=scale, is_coarse=False).to(dtype)
    indices, moved = np.arange(num_rows), scores.cuda()
    ours, theirs = TritonChoice(capacity=capacity), NumpyChoice()
    draws = make_draws(num_rows, vocab_size, seed=4)
    assert ours.greedy(moved, indices).tolist() == theirs.greedy(scores, indices).tolist()
    found, expected = ours.filtered(moved, indices, draws), theirs.filtered(scores, indices, draws)
    # The CPU sums float32 weights where top_p alone limits a row, so that rounding may decide.
    assert (found.cpu() != expected).sum() <= 1
    found, expected = (
        ours.unfiltered(moved, indices, draws),
        theirs.unfiltered(scores, indices, draws),
    )
    assert (found.cpu() != expected).sum() <= 2


@pytest.mark.gpu
@GPU
def test_tokens_depend_on_no_other_row() -> None:
    num_rows, vocab_size = 64, 128256
    scores = make_scores(num_rows, vocab_size, seed=5, scale=2.0, is_coarse=False).bfloat16().cuda()
    draws, choice = make_draws(num_rows, vocab_size, seed=6), TritonChoice()
    together = choice.filtered(scores, np.arange(num_rows), draws)
    for row in range(0, num_rows, 7):
        alone = Draws(
            **{
                name: getattr(draws, name)[row : row + 1]
                for name in ("temperature", "top_k", "top_p", "min_p", "uniform")
            }
        )
        assert choice.filtered(scores, np.array([row]), alone).tolist() == [int(together[row])]
