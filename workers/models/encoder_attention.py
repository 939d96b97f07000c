"""Self attention of an encoder's layer: no rotation, and a bias on every projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attention.layer import Attention
from workers.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear
from workers.layers.weight import CompositeLayer, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from attention.abstract import AttentionBackend, AttentionMetadata, AttentionParams
    from workers.layers.weight import Layer
    from workers.parallel.group import ParallelGroup

__all__ = ["EncoderSelfAttention", "ProjectionNames"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionNames:
    """The names in the checkpoint of the projections of one layer."""

    query: str
    key: str
    value: str
    output: str


class EncoderSelfAttention(CompositeLayer):
    """Multi-head attention (Vaswani et al. 2017); heads are sharded over the ranks."""

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
        hidden_size = self._size * group.size
        part = part_of(hidden_size, group)
        self._qkv = ColumnParallelLinear(
            hidden_size,
            [
                Columns(name=name, total=hidden_size, part=part)
                for name in (names.query, names.key, names.value)
            ],
            has_bias=True,
            dtype=dtype,
            device=device,
        )
        self._attend = Attention(params, layer_index=layer_index, backend=backend).forward
        self._output = RowParallelLinear(
            names.output,
            hidden_size,
            hidden_size,
            has_bias=True,
            group=group,
            dtype=dtype,
            device=device,
        )

    def __call__(
        self, hidden: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]` for `[num_tokens, hidden_size]`."""
        query, key, value = self._qkv(hidden).split(self._size, dim=1)
        return self._output(self._attend(query, key, value, kv_cache, metadata))

    def sublayers(self) -> Iterator[Layer]:
        yield self._qkv
        yield self._output
