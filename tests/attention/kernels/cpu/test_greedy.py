"""The most likely tokens of bfloat16 scores, against NumPy's argmax of the same numbers."""

import numpy as np
import pytest
import torch

from attention.kernels.cpu.greedy import Greedy

INFINITY = float("inf")


@pytest.fixture(scope="module")
def greedy() -> Greedy:
    """Return the kernel."""
    kernel = Greedy.make()
    if kernel is None:
        pytest.skip("needs a C compiler")
    return kernel


@pytest.mark.parametrize("size", [1, 2, 31, 511, 512, 513, 5000])
@pytest.mark.parametrize("scale", [0.01, 3.0, 1e38])
def test_the_first_of_the_highest_scores_is_found(greedy: Greedy, size: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(size)
    # Few distinct numbers, so that many are equal, in rows that are wider than the vocabulary.
    numbers = torch.randint(-40, 40, (9, size + 3), generator=generator) / 40 * scale
    numbers[4] = -numbers[4].abs() - scale
    scores = numbers.bfloat16()[:, :size]
    rows = np.array([8, 0, 4, 4, 2], dtype=np.int64)
    found = greedy(scores, rows)
    assert found.dtype == torch.int64
    assert found.tolist() == scores.float().numpy()[rows].argmax(1).tolist()


@pytest.mark.parametrize("place", [0, 511, 512, 700, 1199])
def test_zeros_of_both_signs_are_equal_and_one_broken_score_breaks_its_row(
    greedy: Greedy, place: int
) -> None:
    scores = torch.full((6, 1200), -2.0, dtype=torch.bfloat16)
    scores[0, place:] = 0.0
    scores[0, place] = -0.0
    scores[1, place] = INFINITY
    scores[2, place] = float("nan")
    scores[3, place] = -float("nan")
    scores[4] = -INFINITY
    scores[5], scores[5, place] = -INFINITY, torch.finfo(torch.bfloat16).min
    assert greedy(scores, np.arange(6)).tolist() == [place, -1, -1, -1, -1, place]


def test_no_rows_and_no_tokens(greedy: Greedy) -> None:
    assert greedy(torch.zeros(3, 7).bfloat16(), np.empty(0, dtype=np.int64)).tolist() == []
    assert greedy(torch.zeros(2, 0).bfloat16(), np.arange(2)).tolist() == [-1, -1]
