"""Pools the hidden states of tokens into one vector per sequence, and changes these vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from workers.layers.weight import Layer, WeightShard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.batch import Pooling
    from pagedray.model_config import DenseModule

__all__ = ["Dense", "pooled"]


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


class Dense(Layer):
    """A linear layer for pooled vectors, in float32; every rank holds all of it."""

    def __init__(self, module: DenseModule, device: torch.device) -> None:
        self.folder = module.folder
        """The name of the folder that has its weights."""
        self._weight = torch.empty(module.out_size, module.in_size, device=device)
        self._bias = torch.empty(module.out_size, device=device) if module.has_bias else None
        self._has_tanh = module.activation == "tanh"

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return `[num_sequences, out_size]` float32 for `[num_sequences, in_size]` float32."""
        output = functional.linear(vectors, self._weight, self._bias)
        return output.tanh_() if self._has_tanh else output

    def weight_shards(self) -> Iterator[WeightShard]:
        for name, target in (("linear.weight", self._weight), ("linear.bias", self._bias)):
            if target is not None:
                part = (slice(None),) * target.dim()
                yield WeightShard(name=name, shape=tuple(target.shape), part=part, target=target)
