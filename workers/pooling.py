"""Pools the hidden states of tokens into one vector per sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from pagedray.batch import Pooling

__all__ = ["pooled"]


def pooled(
    hidden: torch.Tensor, lengths: torch.Tensor, pooling: Pooling, *, normalize: bool
) -> torch.Tensor:
    """Return `[num_sequences, hidden_size]` float32.

    `hidden` is `[num_tokens, hidden_size]`, the sequences one after another and padding after
    them. `lengths` is `[num_sequences]` int64, each at least 1. `mean` averages all tokens, `cls`
    takes the first and `last` the last. Normalized vectors have an L2 norm of 1.
    """
    stops = lengths.cumsum(0)
    if pooling == "cls":
        vectors = hidden.index_select(0, stops - lengths).float()
    elif pooling == "last":
        vectors = hidden.index_select(0, stops - 1).float()
    else:
        # In float32, since a long sum in bfloat16 loses most of its terms.
        vectors = torch.segment_reduce(
            hidden[: int(lengths.sum())].float(), "mean", lengths=lengths, axis=0, unsafe=True
        )
    return functional.normalize(vectors, dim=1) if normalize else vectors
