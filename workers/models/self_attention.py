"""Self attention of one layer: projections, norms of heads, rotation, and the backend's part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attention.abstract import AttentionParams, AttentionSpec
from attention.layer import Attention
from workers.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear
from workers.layers.norm import RowNorm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attention.abstract import AttentionBackend, AttentionMetadata
    from pagedray.config import ModelConfig
    from workers.layers.rope import Rotation
    from workers.layers.weight import Layer, WeightSlot
    from workers.parallel import ParallelGroup

__all__ = ["SelfAttention", "attention_params", "attention_spec"]


def attention_params(
    config: ModelConfig, layer_index: int, group: ParallelGroup
) -> AttentionParams:
    """Return what one layer asks of the attention backend on this rank."""
    params = AttentionParams(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        scale=config.head_size**-0.5,
        sliding_window=config.sliding_window(layer_index),
    )
    return params.shard(group.rank, group.size)


def attention_spec(
    config: ModelConfig, group: ParallelGroup, *, block_size: int, device: torch.device
) -> AttentionSpec:
    """Return what the model asks of the attention backend on this rank."""
    return AttentionSpec(
        layers=tuple(attention_params(config, i, group) for i in range(config.num_layers)),
        dtype=getattr(torch, config.dtype),
        device=device,
        block_size=block_size,
    )


class SelfAttention:
    """Heads are spread over the ranks; where ranks exceed KV heads, several hold the same one."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        layer_index: int,
        group: ParallelGroup,
        *,
        backend: type[AttentionBackend],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        params = attention_params(config, layer_index, group)
        size = config.head_size
        self._num_rotated = params.num_heads + params.num_kv_heads
        self._head_size = size
        self._query_size = params.num_heads * size
        self._rotated_size = self._num_rotated * size
        self._kv_size = params.num_kv_heads * size
        query = slice(group.rank * self._query_size, (group.rank + 1) * self._query_size)
        first = group.rank * config.num_kv_heads // group.size * size
        key_value = slice(first, first + self._kv_size)
        self._qkv = ColumnParallelLinear(
            config.hidden_size,
            [
                Columns(name=f"{name}.q_proj", total=config.num_heads * size, part=query),
                Columns(name=f"{name}.k_proj", total=config.num_kv_heads * size, part=key_value),
                Columns(name=f"{name}.v_proj", total=config.num_kv_heads * size, part=key_value),
            ],
            has_bias=config.has_qkv_bias,
            dtype=dtype,
            device=device,
        )
        self._head_norm = None
        if config.has_qk_norm:
            self._head_norm = RowNorm(
                f"{name}.q_norm.weight",
                f"{name}.k_norm.weight",
                size,
                config.norm_eps,
                num_heads=params.num_heads,
                num_kv_heads=params.num_kv_heads,
                dtype=dtype,
                device=device,
            )
        self._attend = Attention(params, layer_index=layer_index, backend=backend).forward
        self._output = RowParallelLinear(
            f"{name}.o_proj",
            config.num_heads * size,
            config.hidden_size,
            has_bias=config.has_output_bias,
            group=group,
            dtype=dtype,
            device=device,
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        rotation: Rotation,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`; keys and values go to the cache."""
        qkv = self._qkv(hidden)
        # Queries and keys lie side by side and are normed and turned as one.
        heads = qkv.narrow(1, 0, self._rotated_size).unflatten(
            1, (self._num_rotated, self._head_size)
        )
        if self._head_norm is not None:
            heads = self._head_norm(heads)
        rotated = rotation(heads).flatten(1)
        attended = self._attend(
            rotated.narrow(1, 0, self._query_size),
            rotated.narrow(1, self._query_size, self._kv_size),
            qkv.narrow(1, self._rotated_size, self._kv_size),
            kv_cache,
            metadata,
        )
        return self._output(attended)

    def slots(self) -> Iterator[WeightSlot]:
        """Yield the weights of all parts."""
        for part in self._parts():
            yield from part.slots()

    def finalize(self) -> None:
        """Bring loaded weights into the form that is computed with."""
        for part in self._parts():
            part.finalize()

    def _parts(self) -> Iterator[Layer]:
        yield self._qkv
        if self._head_norm is not None:
            yield self._head_norm
        yield self._output
