"""Samples tokens from rows of scores without sorting them.

`workers.sampling.choice` defines which token is sampled: the highest sum of score and noise among
the tokens that filters keep. For filters, weights (unnormalized probabilities) are integers in
units of `2 ** -40` of the weight of the likeliest token, so their sums are exact, and depend
neither on the order of summation nor on how a row is divided among programs.

Every kernel takes `scores` `[num_scores, vocab_size]` in any float dtype, `indices` int64
`[num_rows]` (which rows of `scores` to sample from) and `parameters` float64 `[5, num_rows]`
(`choice.launch.choose_unfiltered` lists them). A grid is `(num_rows, splits)` or `(num_rows,)`.
"""

from attention.kernels.triton.choice.launch import (
    argmax,
    choose_filtered,
    choose_greedy,
    choose_unfiltered,
    local_maxima,
)

__all__ = ["argmax", "choose_filtered", "choose_greedy", "choose_unfiltered", "local_maxima"]
