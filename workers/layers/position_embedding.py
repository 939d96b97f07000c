"""Learned embeddings of positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from workers.layers.weight import Layer, WeightShard

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PositionEmbedding"]


class PositionEmbedding(Layer):
    """A learned vector for each position; every rank holds the whole table."""

    def __init__(
        self,
        name: str,
        max_positions: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._name = name
        self._table = torch.empty(max_positions, hidden_size, dtype=dtype, device=device)

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]` for positions `[num_tokens]` int64."""
        return functional.embedding(positions, self._table)

    def weight_shards(self) -> Iterator[WeightShard]:
        yield WeightShard(
            name=self._name,
            shape=tuple(self._table.shape),
            part=(slice(None), slice(None)),
            target=self._table,
        )
