"""Self attention of a decoder's layer: projections, QK norm, rotation and the backend's part."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attention.abstract import AttentionParams, AttentionSpec, AttentionType
from attention.layer import Attention
from pagedray.rank_roofline import WeightWork
from workers.layers.linear import ColumnParallelLinear, RowParallelLinear
from workers.layers.norm import QKNorm
from workers.layers.weight import CompositeLayer, WeightShard, part_of
from workers.layers.whole_qk_norm import WholeQKNorm
from workers.models.qkv_columns import qkv_columns
from workers.models.step_attention import SelectedAttention

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attention.abstract import AttentionBackend
    from attention.kernels.new_tokens import Rotary
    from attention.kernels.quantized_rows import QuantizedRows
    from attention.kernels.split_rows import SplitRows
    from attention.kernels.unnormed_row import UnnormedRow
    from pagedray.model_config import ModelConfig
    from workers.layers.linear_kernels.linear_kernel import LinearKernel
    from workers.layers.rope import Rotation
    from workers.layers.weight import Layer
    from workers.models.step_attention import StepAttention
    from workers.parallel.group import ParallelGroup

__all__ = ["DecoderSelfAttention", "attention_params", "attention_spec"]


def attention_params(
    config: ModelConfig, layer_index: int, group: ParallelGroup
) -> AttentionParams:
    """Return the parameters of one layer's attention on this rank."""
    scale = config.attention_scale
    params = AttentionParams(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        scale=config.head_size**-0.5 if scale is None else scale,
        sliding_window=config.sliding_window(layer_index),
        soft_cap=config.attention_soft_cap,
        alibi_slopes=config.alibi_slopes,
        has_sinks=config.has_sinks,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    if config.is_bidirectional:
        params = replace(params, attention_type=AttentionType.ENCODER_ONLY)
    if config.cache_scales:
        scales = config.cache_scales[layer_index]
        params = replace(params, k_scale=scales.keys, v_scale=scales.values)
    return params.shard(group.rank, group.size)


def attention_spec(
    config: ModelConfig,
    group: ParallelGroup,
    *,
    block_size: int,
    device: torch.device,
    max_seq_len: int | None = None,
) -> AttentionSpec:
    """Return what the attention backend must support on this rank."""
    return AttentionSpec(
        layers=tuple(attention_params(config, i, group) for i in range(config.num_layers)),
        dtype=getattr(torch, config.dtype),
        device=device,
        block_size=block_size,
        max_seq_len=max_seq_len,
    )


class DecoderSelfAttention(CompositeLayer):
    """Self attention, with heads sharded over the ranks.

    KV heads are replicated if there are fewer than ranks. Without `reduces`, the output is this
    rank's part of the sum.
    """

    def __init__(
        self,
        prefix: str,
        config: ModelConfig,
        layer_index: int,
        group: ParallelGroup,
        *,
        reduces: bool,
        backend: type[AttentionBackend],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        params = attention_params(config, layer_index, group)
        size = config.head_size
        self._num_rotated = params.num_heads + params.num_kv_heads
        self._head_size = size
        self._rotated_size = self._num_rotated * size
        self._kv_size = params.num_kv_heads * size
        self._qkv = ColumnParallelLinear(
            config.hidden_size,
            qkv_columns(prefix, config, group),
            has_bias=config.has_qkv_bias,
            quantization=config.quantization,
            dtype=dtype,
            device=device,
        )
        self._limit = config.qkv_limit
        self._is_last = layer_index == config.num_layers - 1
        self._parts: tuple[LinearKernel, LinearKernel] | None = None
        """The products of queries and of keys and values, if the last layer can have both."""
        self._head_norm = _head_norm(prefix, config, params, group, dtype=dtype, device=device)
        self._neighbors = _neighbor_order(config, params, device)
        self._sinks = None
        if config.has_sinks:
            self._sinks = torch.empty(params.num_heads, dtype=torch.float32, device=device)
        self._sinks_name = f"{prefix}.{config.names.sinks}"
        quantization = config.quantization
        self._scale_names: tuple[str, ...] = ()
        if quantization is not None and quantization.has_cache_scales:
            self._scale_names = config.cache_scale_names(layer_index)
        self._group = group
        self._attention = Attention(
            params, layer_index=layer_index, backend=backend, sinks=self._sinks
        )
        self._output_scale = config.residual_scale
        self._output = RowParallelLinear(
            f"{prefix}.{config.names.attention_output}",
            config.num_heads * size,
            config.hidden_size,
            has_bias=config.has_output_bias,
            reduces=reduces,
            group=group,
            quantization=config.quantization,
            dtype=dtype,
            device=device,
        )

    def takes_quantized(self, num_rows: int) -> bool:
        """Return whether a call with this number of rows takes them as `QuantizedRows`, too."""
        return self._qkv.takes_quantized(num_rows)

    def takes_unnormed(self, num_rows: int) -> bool:
        """Return whether a call with this number of rows takes an `UnnormedRow`, too."""
        return self._qkv.takes_unnormed(num_rows)

    def __call__(
        self,
        hidden: torch.Tensor | QuantizedRows | UnnormedRow,
        rotation: Rotation,
        attention: StepAttention,
    ) -> torch.Tensor:
        """Return the attention of all tokens of a step, as `output` takes it.

        `hidden` is `[num_tokens, hidden_size]`.
        """
        if isinstance(hidden, torch.Tensor):
            if isinstance(attention, SelectedAttention) and self._parts is not None:
                selected = rotation.select(attention.indices)
                if selected is not None:
                    rotations = selected, rotation
                    return self._attend_selected(hidden, self._parts, rotations, attention)
            rotary = self.rotary_of_products(rotation, (len(hidden),))
            if rotary is not None:
                qkv = hidden.new_empty(len(hidden), self.num_qkv_columns)
                self.write_qkv(hidden, qkv, rotary)
                return self.attend(qkv, None, attention)
        return self.attend(self._qkv(hidden), rotation, attention)

    @property
    def num_qkv_columns(self) -> int:
        """The number of columns of queries, keys and values on this rank."""
        return self._qkv.num_columns

    def rotary_of_products(self, rotation: Rotation, sizes: Iterable[int]) -> Rotary | None:
        """Return what `write_qkv` needs to rotate the heads itself.

        None if that takes longer for one of the numbers of tokens, or something comes in between.
        """
        if rotation.rotary is None or self._head_norm is not None or self._limit is not None:
            return None
        head_size, num_rotated = self._head_size, self._rotated_size
        if not all(self._qkv.rotates(size, head_size, num_rotated) for size in sizes):
            return None
        return rotation.rotary

    def write_qkv(
        self, hidden: torch.Tensor | QuantizedRows, out: torch.Tensor, rotary: Rotary | None
    ) -> None:
        """Write the queries, keys and values of some tokens to `out`, as `attend` takes them.

        `hidden` is `[num_tokens, hidden_size]`, and `out` `[num_tokens, num_qkv_columns]`. Queries
        and keys are rotated if `rotary` is given, which is that of these tokens.
        """
        if rotary is None:
            self._qkv.write(hidden, out)
        else:
            assert isinstance(hidden, torch.Tensor)
            self._qkv.write_rotated(hidden, rotary, self._rotated_size, out)

    def attend(
        self, qkv: torch.Tensor, rotation: Rotation | None, attention: StepAttention
    ) -> torch.Tensor:
        """Return the attention of all tokens of a step, as `output` takes it; may change `qkv`.

        `qkv` is `[num_tokens, num_qkv_columns]`. Without a rotation, its queries and keys are
        already rotated.
        """
        if self._limit is not None:
            qkv = qkv.clamp_(-self._limit, self._limit)
        # Queries and keys are adjacent, so that one call norms and one rotates both.
        heads = qkv.narrow(1, 0, self._rotated_size).unflatten(
            1, (self._num_rotated, self._head_size)
        )
        if self._head_norm is not None:
            heads = self._head_norm(heads)
        values = qkv.narrow(1, self._rotated_size, self._kv_size)
        if rotation is None:
            return attention.attend_heads(self._attention, heads, values)
        return attention.attend_rotated(self._attention, heads, values, rotation)

    def _attend_selected(
        self,
        hidden: torch.Tensor,
        parts: tuple[LinearKernel, LinearKernel],
        rotations: tuple[Rotation, Rotation],
        attention: SelectedAttention,
    ) -> torch.Tensor:
        """Return the attention of the selected tokens, and compute no other queries.

        `parts` and `rotations` are those of queries, then those of keys.
        """
        (query_part, kv_part), (query_rotation, key_rotation) = parts, rotations
        by_head = (-1, self._head_size)
        key, value = kv_part(hidden).split(self._kv_size, dim=1)
        key = key_rotation(key.unflatten(1, by_head)).flatten(1)
        # A chunk before a prompt's end has none, and kernels take at least one row.
        query = hidden.new_empty(0, self._rotated_size - self._kv_size)
        if len(attention.indices):
            query = query_part(hidden.index_select(0, attention.indices))
            query = query_rotation(query.unflatten(1, by_head)).flatten(1)
        return attention.attend_selected(self._attention, query, key, value)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """Return the output, `[num_tokens, hidden_size]`, for the attention of some tokens."""
        out = self._output(attended)
        return out if self._output_scale == 1.0 else out.mul_(self._output_scale)

    def add_or_return_output(
        self, stream: torch.Tensor, attended: torch.Tensor
    ) -> torch.Tensor | SplitRows | None:
        """Add the output to the stream, in place, if one kernel does both; else return it."""
        if self._output_scale != 1.0:
            return self.output(attended)
        return self._output.add_or_return(stream, attended)

    def output_work(self) -> WeightWork:
        """Return what the weights of the output cost a step."""
        return self._output.weight_work()

    def weight_shards(self) -> Iterator[WeightShard]:
        yield from super().weight_shards()
        if self._sinks is not None:
            num_heads = len(self._sinks) * self._group.size
            yield WeightShard(
                name=self._sinks_name,
                shape=(num_heads,),
                part=(part_of(num_heads, self._group),),
                target=self._sinks,
            )

        for name in self._scale_names:
            # They are read before, since attention is planned with them.
            scale = torch.empty(1)
            yield WeightShard(name=name, shape=(1,), part=(slice(None),), target=scale, dummy=1.0)

    def weight_work(self) -> WeightWork:
        work = super().weight_work()
        return work if self._sinks is None else work + WeightWork(num_bytes=self._sinks.nbytes)

    def finalize(self) -> None:
        if self._neighbors is not None:
            self._qkv.reorder(self._neighbors)
            self._neighbors = None
        super().finalize()
        if self._is_last and self._head_norm is None and self._limit is None:
            query_size = self._rotated_size - self._kv_size
            queries = self._qkv.kernel_of(slice(query_size))
            others = self._qkv.kernel_of(slice(query_size, self.num_qkv_columns))
            if queries is not None and others is not None:
                self._parts = queries, others

    def sublayers(self) -> Iterator[Layer]:
        yield self._qkv
        if self._head_norm is not None:
            yield self._head_norm
        yield self._output


def _head_norm(
    prefix: str,
    config: ModelConfig,
    params: AttentionParams,
    group: ParallelGroup,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> QKNorm | WholeQKNorm | None:
    """Return the norm of queries and keys, or None."""
    if not config.has_qk_norm:
        return None
    query_name, key_name = config.names.qk_norms
    names = (f"{prefix}.{query_name}", f"{prefix}.{key_name}")
    if config.is_qk_norm_whole:
        return WholeQKNorm(
            names,
            config.head_size,
            config.norm_eps,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            group=group,
            dtype=dtype,
            device=device,
        )
    return QKNorm(
        names,
        config.head_size,
        config.norm_eps,
        num_heads=params.num_heads,
        num_kv_heads=params.num_kv_heads,
        has_offset=config.norm_kind == "offset_rms",
        dtype=dtype,
        device=device,
    )


def _neighbor_order(
    config: ModelConfig, params: AttentionParams, device: torch.device
) -> torch.Tensor | None:
    """Return the columns of queries, keys and values with adjacent pairs half a head apart.

    Scores stay the same, since queries and keys are reordered alike. None keeps the order.
    """
    if config.rope is None or not config.rope.is_interleaved:
        return None
    size = config.head_size
    order = torch.arange(size * (params.num_heads + 2 * params.num_kv_heads), device=device)
    rotated = order[: size * (params.num_heads + params.num_kv_heads)].view(-1, size)
    part = rotated[:, : config.rope.rotary_size or size]
    part.copy_(torch.cat((part[:, ::2], part[:, 1::2]), dim=1))
    return order
