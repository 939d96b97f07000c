"""Attention from a decoder's tokens to those of its encoder."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attention.abstract import AttentionMetadata, AttentionParams
from attention.layer import Attention
from workers.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear
from workers.layers.weight import CompositeLayer, Layer, Placement, part_of
from workers.models.bert import ProjectionNames


class CrossAttention(CompositeLayer):
    """Queries from the decoder, keys and values from the encoder; all projections have a bias."""

    def __init__(
        self,
        names: ProjectionNames,
        params: AttentionParams,
        layer_index: int,
        place: Placement,
    ) -> None:
        """`params` are those of this rank."""
        assert place.backend is not None
        self._size = params.num_heads * params.head_size
        hidden_size = self._size * place.group.size
        part = part_of(hidden_size, place.group)

        def projection(*names: str) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                hidden_size,
                [Columns(name=name, total=hidden_size, part=part) for name in names],
                place,
                has_bias=True,
            )

        self._query = projection(names.query)
        self._key_value = projection(names.key, names.value)
        self._attend = Attention(params, layer_index=layer_index, backend=place.backend).forward
        self._output = RowParallelLinear(
            names.output, hidden_size, hidden_size, place, has_bias=True
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        encoded: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`.

        `encoded` is `[num_encoder_tokens, hidden_size]`, what the encoder made in this step, or
        None if it ran for no sequence.
        """
        key, value = None, None
        if encoded is not None:
            key, value = self._key_value(encoded).split(self._size, dim=1)
        return self._output(self._attend(self._query(hidden), key, value, kv_cache, metadata))

    def sublayers(self) -> Iterator[Layer]:
        yield self._query
        yield self._key_value
        yield self._output
