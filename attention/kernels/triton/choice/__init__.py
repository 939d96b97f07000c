"""Draws tokens from rows of scores without sorting them.

What a choice is, `workers.sampling.choice` defines. Weights are integers (units of `2 ** -40` of
the likeliest token's), so that their sums are exact and depend neither on the order of summation
nor on how a row is divided among programs.

Every kernel takes `scores` `[num_scores, vocab_size]` in any float dtype, `indices` int64
`[num_rows]` (the rows of `scores` that are meant) and `parameters` float64 `[5, num_rows]`.
"""

from attention.kernels.triton.choice.launch import (
    choose_filtered,
    choose_greedy,
    choose_unfiltered,
    find_leaders,
    take_leaders,
)

__all__ = [
    "choose_filtered",
    "choose_greedy",
    "choose_unfiltered",
    "find_leaders",
    "take_leaders",
]
