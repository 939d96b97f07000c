"""Attention without rotation, whose projections all have a bias: that of BERT and BART."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attention.layer import Attention
from workers.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear
from workers.layers.weight import Composite

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from attention.abstract import AttentionBackend, AttentionMetadata, AttentionParams
    from workers.layers.weight import Layer
    from workers.parallel import ParallelGroup

__all__ = ["CrossAttention", "ProjectionNames", "SelfAttention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionNames:
    """What the checkpoint calls the projections of one layer."""

    query: str
    key: str
    value: str
    output: str


class _Projections(Composite):
    """The heads of this rank: how they are read from a checkpoint, and their output."""

    def __init__(
        self,
        names: ProjectionNames,
        params: AttentionParams,
        layer_index: int,
        group: ParallelGroup,
        *,
        backend: type[AttentionBackend],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`params` are those of this rank; queries, keys and values have as many heads."""
        assert params.num_heads == params.num_kv_heads
        self._size = params.num_heads * params.head_size
        self._hidden_size = self._size * group.size
        self._part = slice(group.rank * self._size, (group.rank + 1) * self._size)
        self._dtype, self._device = dtype, device
        self._attend = Attention(params, layer_index=layer_index, backend=backend).forward
        self._output = RowParallelLinear(
            names.output,
            self._hidden_size,
            self._hidden_size,
            has_bias=True,
            group=group,
            dtype=dtype,
            device=device,
        )

    def _projection(self, *names: str) -> ColumnParallelLinear:
        """Return the product with one or several layers of the checkpoint."""
        return ColumnParallelLinear(
            self._hidden_size,
            [Columns(name=name, total=self._hidden_size, part=self._part) for name in names],
            has_bias=True,
            dtype=self._dtype,
            device=self._device,
        )


class SelfAttention(_Projections):
    """Attention among the tokens of a stack."""

    def __init__(
        self,
        names: ProjectionNames,
        params: AttentionParams,
        layer_index: int,
        group: ParallelGroup,
        *,
        backend: type[AttentionBackend],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(
            names, params, layer_index, group, backend=backend, dtype=dtype, device=device
        )
        self._qkv = self._projection(names.query, names.key, names.value)

    def __call__(
        self, hidden: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`."""
        query, key, value = self._qkv(hidden).split(self._size, dim=1)
        return self._output(self._attend(query, key, value, kv_cache, metadata))

    def parts(self) -> Iterator[Layer]:
        """Yield the projections."""
        yield self._qkv
        yield self._output


class CrossAttention(_Projections):
    """Attention from a decoder's tokens to those of its encoder."""

    def __init__(
        self,
        names: ProjectionNames,
        params: AttentionParams,
        layer_index: int,
        group: ParallelGroup,
        *,
        backend: type[AttentionBackend],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(
            names, params, layer_index, group, backend=backend, dtype=dtype, device=device
        )
        self._query = self._projection(names.query)
        self._key_value = self._projection(names.key, names.value)

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

    def parts(self) -> Iterator[Layer]:
        """Yield the projections."""
        yield self._query
        yield self._key_value
        yield self._output
