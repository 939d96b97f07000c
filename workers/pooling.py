"""From the hidden states of tokens to one vector a sequence."""

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

    `hidden` is `[num_tokens, hidden_size]`, flat in the order of the sequences, whose lengths,
    `[num_sequences]` int64, are all at least 1; rows behind them are padding. `mean` is the mean
    of all tokens, `cls` the first and `last` the last. Normalized vectors have length 1.
    """
    stops = lengths.cumsum(0)
    if pooling == "cls":
        vectors = hidden.index_select(0, stops - lengths).float()
    elif pooling == "last":
        vectors = hidden.index_select(0, stops - 1).float()
    else:
        # In float32, because a sum of many numbers of 8 bits is none of their mean.
        vectors = torch.segment_reduce(
            hidden[: int(lengths.sum())].float(), "mean", lengths=lengths, axis=0, unsafe=True
        )
    return functional.normalize(vectors, dim=1) if normalize else vectors
