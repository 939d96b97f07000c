"""Self attention of a decoder's layer: projections, QK norm, rotation and the backend's part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attention.abstract import (
    AttentionInputs,
    AttentionMetadata,
    AttentionParams,
    AttentionSpec,
    AttentionType,
)
from attention.layer import Attention
from pagedray.rank_roofline import WeightWork
from workers.layers.fused_kernels import sigmoid_gate_kernel
from workers.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear, columns_of
from workers.layers.norm import QKNorm, WholeQKNorm
from workers.layers.recurrent import StepStates, layer_states
from workers.layers.rope import Rotation
from workers.layers.weight import CompositeLayer, Placement, WeightShard, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.model_config import ModelConfig
    from workers.parallel.group import ParallelGroup

__all__ = [
    "CachedAttention",
    "DecoderSelfAttention",
    "HeadInputs",
    "SelectedAttention",
    "SelectedRows",
    "StepAttention",
    "attention_params",
    "attention_spec",
    "qkv_columns",
]


def attention_params(
    config: ModelConfig, layer_index: int, group: ParallelGroup
) -> AttentionParams:
    """Return the parameters of one layer's attention on this rank."""
    scale, heads = config.attention_scale, config.heads_of(layer_index)
    params = AttentionParams(
        num_heads=config.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        scale=heads.head_size**-0.5 if scale is None else scale,
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
    drafter: ModelConfig | None = None,
) -> AttentionSpec:
    """Return what the attention backend must support on this rank.

    The layers of `drafter`, a draft head or a draft model, follow the layers of the model.
    Layers that read the keys and values of an earlier layer have the entry of that layer. If all
    layers are recurrent, the blocks of the cache are those of a layer that does not exist.
    """
    layers = [attention_params(config, i, group) for i in config.cached_layers or (0,)]
    if drafter is not None:
        layers += [attention_params(drafter, i, group) for i in drafter.cached_layers]
    return AttentionSpec(
        layers=tuple(layers),
        dtype=getattr(torch, config.dtype),
        device=device,
        block_size=block_size,
        max_seq_len=max_seq_len,
        states=layer_states(config, group),
    )


class DecoderSelfAttention(CompositeLayer):
    """Self attention, with heads sharded over the ranks.

    KV heads are replicated if there are fewer than ranks.
    """

    def __init__(
        self,
        prefix: str,
        config: ModelConfig,
        layer_index: int,
        place: Placement,
        *,
        input_size: int | None = None,
    ) -> None:
        """`input_size` overrides the size of the stream."""
        group, device = place.group, place.device
        assert place.backend is not None
        params = attention_params(config, layer_index, group)
        source = config.heads_of(layer_index).source
        size = params.head_size
        num_kv_heads = params.num_kv_heads if source is None else 0
        self._num_rotated = params.num_heads + num_kv_heads
        self.head_size = size
        self.query_size = params.num_heads * size
        self.kv_size = num_kv_heads * size
        self._gate_size = self.query_size if config.has_attention_gate else 0
        self._gate_kernel = sigmoid_gate_kernel(device)
        self.rotated_size = self._num_rotated * size
        self.qkv = ColumnParallelLinear(
            input_size or config.hidden_size,
            qkv_columns(prefix, config, layer_index, group),
            place,
            has_bias=config.has_qkv_bias,
            input_scale=config.multipliers.attention_input,
        )
        self._limit = config.qkv_limit
        self._head_norm = _head_norm(prefix, config, params, place, has_keys=source is None)
        self._norms_values = config.has_value_norm and source is None
        self._neighbors = _neighbor_order(config, params, device)
        self._sinks = None
        if config.has_sinks:
            self._sinks = torch.empty(params.num_heads, dtype=torch.float32, device=device)
        self._sinks_name = f"{prefix}.{config.names.sinks}"
        self._scale_names: tuple[str, ...] = ()
        has_scales = config.quantization is not None and config.quantization.has_cache_scales
        if has_scales and source is None:
            self._scale_names = config.cache_scale_names(layer_index)
        self._group = group
        self._is_source = any(heads.source == layer_index for heads in config.layer_heads)
        index = config.cache_indices[layer_index]
        assert index is not None
        self.layer = Attention(params, layer_index=index, backend=place.backend, sinks=self._sinks)
        self.output = RowParallelLinear(
            f"{prefix}.{config.names.attention_output}",
            config.num_heads * size,
            config.hidden_size,
            place,
            has_bias=config.has_output_bias,
            scale=config.multipliers.attention_output,
        )

    def __call__(
        self, x: torch.Tensor, rotation: Rotation, attention: StepAttention
    ) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]` for `[num_tokens, hidden_size]`."""
        return self.output(self.attend(self.qkv(x), rotation, attention))

    @property
    def rotates_products(self) -> bool:
        """Whether the products of queries and keys are rotated as they are."""
        return self._head_norm is None and self._limit is None

    def attend(
        self, qkv: torch.Tensor, rotation: Rotation | None, attention: StepAttention
    ) -> torch.Tensor:
        """Return the attention of this rank's heads, `[num_tokens, num_heads * head_size]`.

        `qkv` is what the product `qkv` returns, and may change. Without a rotation, its queries
        and keys are already rotated.
        """
        if self._gate_size:
            qkv, gate = qkv.split((qkv.shape[1] - self._gate_size, self._gate_size), dim=1)
            if isinstance(attention, SelectedAttention):
                gate = gate.index_select(0, attention.indices)
            out = self._attend(qkv, rotation, attention)
            if self._gate_kernel is not None:
                return self._gate_kernel(out, gate)
            return out.mul_(gate.sigmoid())
        return self._attend(qkv, rotation, attention)

    def _attend(
        self, qkv: torch.Tensor, rotation: Rotation | None, attention: StepAttention
    ) -> torch.Tensor:
        if self._limit is not None:
            qkv = qkv.clamp_(-self._limit, self._limit)
        # Queries and keys are adjacent, so that one call norms and one rotates both.
        heads = qkv.unflatten(1, (-1, self.head_size))
        rotated, values = heads[:, : self._num_rotated], heads[:, self._num_rotated :]
        if self._head_norm is not None and self._norms_values:
            heads = self._head_norm(heads)
            rotated, values = heads[:, : self._num_rotated], heads[:, self._num_rotated :]
        elif self._head_norm is not None:
            rotated = self._head_norm(rotated)
        inputs = HeadInputs(
            rotated, values if self.kv_size else None, rotation, is_source=self._is_source
        )
        return attention.attend(self.layer, inputs)

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
            yield WeightShard.whole(name, scale, dummy=1.0)

    def weight_work(self) -> WeightWork:
        work = super().weight_work()
        return work if self._sinks is None else work + WeightWork(num_bytes=self._sinks.nbytes)

    def finalize(self) -> None:
        if self._neighbors is not None:
            self.qkv.kernel.reorder(self._neighbors)
            self._neighbors = None
        super().finalize()


def qkv_columns(
    prefix: str, config: ModelConfig, layer_index: int, group: ParallelGroup
) -> list[Columns]:
    """Return the columns of this rank's heads: all queries, then all keys, then all values.

    Gates of queries follow. KV heads are replicated if there are more ranks than KV heads. A layer
    without keys and values of its own has queries alone.
    """
    names = [f"{prefix}.{name}" for name in config.names.qkv]
    if config.names.is_qkv_by_head:
        (name,) = names
        return _columns_by_head(name, config, group)
    heads = config.heads_of(layer_index)
    size, num_kv_heads = heads.head_size, heads.num_kv_heads
    query_size, kv_size = config.num_heads * size, num_kv_heads * size
    first = group.rank * num_kv_heads // group.size * size
    key_value = slice(first, first + max(1, num_kv_heads // group.size) * size)
    query = query_size, part_of(query_size, group)
    if config.has_attention_gate:
        queries, gates = _gated_queries(names[0], config, group)
        others = columns_of(names[1:], [(kv_size, key_value)] * 2)
        return [*queries, *others, *gates]
    if heads.source is not None:
        return columns_of(names[:1], [query])
    if heads.has_key_values:
        # The columns of keys, twice: a kernel norms all heads, keys with a weight.
        names[2] = names[1]
    return columns_of(names, [query, (kv_size, key_value), (kv_size, key_value)])


def _gated_queries(
    name: str, config: ModelConfig, group: ParallelGroup
) -> tuple[list[Columns], list[Columns]]:
    """Return the columns of queries and of gates in a tensor `[num_heads, 2, head_size]`."""
    size, heads = config.head_size, part_of(config.num_heads, group)
    total = 2 * config.num_heads * size

    def columns(kind: int) -> list[Columns]:
        firsts = [(2 * head + kind) * size for head in range(heads.start, heads.stop)]
        return [Columns(name=name, total=total, part=slice(i, i + size)) for i in firsts]

    return columns(0), columns(1)


def _columns_by_head(name: str, config: ModelConfig, group: ParallelGroup) -> list[Columns]:
    """Return the columns of a fused tensor with output columns `[num_heads, 3, head_size]`."""
    assert config.num_kv_heads == config.num_heads
    size = config.head_size
    heads = part_of(config.num_heads, group)
    firsts = [
        (3 * head + kind) * size for kind in range(3) for head in range(heads.start, heads.stop)
    ]
    total = 3 * config.num_heads * size
    return [Columns(name=name, total=total, part=slice(i, i + size)) for i in firsts]


def _head_norm(
    prefix: str, config: ModelConfig, params: AttentionParams, place: Placement, *, has_keys: bool
) -> QKNorm | WholeQKNorm | None:
    """Return the norm of queries and keys, or None. Without keys, it is that of queries."""
    if not config.has_qk_norm:
        return None
    query_name, key_name = config.names.qk_norms
    names = (f"{prefix}.{query_name}", f"{prefix}.{key_name}")
    if config.is_qk_norm_whole:
        return WholeQKNorm(
            names,
            config.head_size,
            config.norm_eps,
            place,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
        )
    return QKNorm(
        names if has_keys else names[:1],
        params.head_size,
        config.norm_eps,
        place,
        num_heads=params.num_heads,
        num_kv_heads=params.num_kv_heads,
        has_offset=config.norm_kind == "offset_rms",
        norms_values=config.has_value_norm and has_keys,
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


@dataclass(frozen=True, slots=True, eq=False)
class HeadInputs:
    """The inputs of a layer whose tokens have queries, keys and values by head."""

    heads: torch.Tensor
    """Queries, then keys, `[num_tokens, num_heads + num_kv_heads, head_size]`; may change."""
    value: torch.Tensor | None
    """`[num_tokens, num_kv_heads, head_size]`. None if the layer has no keys and values: `heads`
    are queries, and read those of an earlier layer."""
    rotation: Rotation | None
    """Of queries and keys; None if they are rotated."""
    is_source: bool = False
    """Whether later layers read these keys and values."""

    def split(
        self, layer: Attention, *, is_rotated: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the queries and the keys, if there are any, rotated or as they are."""
        heads = self.heads
        if is_rotated and self.rotation is not None:
            heads = self.rotation(heads)
        if self.value is None:
            return heads, None
        query, key = heads.split((layer.params.num_heads, layer.params.num_kv_heads), dim=1)
        return query, key


class StepAttention(ABC):
    """Computes the attention of every layer in one forward pass.

    It keeps the keys and values that later layers read, as tokens of a prompt need those of the
    step.
    """

    states: StepStates | None = None
    """The states of recurrent layers, if there are any."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        """Keys and values by the index of their layer in the cache."""

    @abstractmethod
    def attend(self, layer: Attention, inputs: HeadInputs) -> torch.Tensor:
        """Return the layer's attention, `[num_tokens, num_heads * head_size]`."""

    def split(
        self, layer: Attention, inputs: HeadInputs, *, is_rotated: bool = True
    ) -> AttentionInputs:
        """Return queries, keys and values; those of an earlier layer are in the cache."""
        query, key = inputs.split(layer, is_rotated=is_rotated)
        value = inputs.value
        if value is None:
            key, value = self._sources[layer.layer_index]
            return AttentionInputs(query, key, value, sinks=layer.sinks, is_cached=True)
        if inputs.is_source:
            self._sources[layer.layer_index] = key, value
        return AttentionInputs(query, key, value, sinks=layer.sinks)


class SelectedAttention(StepAttention):
    """Computes the attention of a layer for some tokens of the step alone."""

    def __init__(self, indices: torch.Tensor) -> None:
        """`indices` are the tokens, `[num_selected]` int64 on their device."""
        super().__init__()
        self.indices = indices

    def attend(self, layer: Attention, inputs: HeadInputs) -> torch.Tensor:
        query, key = inputs.split(layer)
        return self.attend_selected(layer, query.index_select(0, self.indices), key, inputs.value)

    @abstractmethod
    def attend_selected(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the attention of the selected tokens, `[num_selected, num_heads * head_size]`.

        `query` has the selected tokens, `key` and `value` have all tokens; each is by head. Keys
        and values are None if an earlier layer has written them to the cache.
        """


class SelectedRows(StepAttention):
    """Computes the attention of layers without keys and values, of which all rows are selected."""

    def __init__(self, selected: SelectedAttention) -> None:
        super().__init__()
        self._selected = selected

    def attend(self, layer: Attention, inputs: HeadInputs) -> torch.Tensor:
        query, key = inputs.split(layer)
        assert key is None
        return self._selected.attend_selected(layer, query, None, None)


class CachedAttention(StepAttention):
    """Writes keys and values to the cache, and attends over it.

    With an empty cache it attends over those of the step alone: all sequences are whole prompts.
    """

    def __init__(
        self, kv_cache: torch.Tensor, metadata: AttentionMetadata, states: StepStates | None = None
    ) -> None:
        super().__init__()
        self._kv_cache = kv_cache
        self._metadata = metadata
        self.states = states

    def attend(self, layer: Attention, inputs: HeadInputs) -> torch.Tensor:
        index = layer.layer_index
        rotary = None if inputs.rotation is None else inputs.rotation.rotary
        is_new = inputs.value is not None and self._kv_cache.numel() > 0
        if not is_new or not self._metadata.rotates_layer(index):
            rotary = None
        given = self.split(layer, inputs, is_rotated=rotary is None)
        if rotary is not None:
            given = replace(given, rotary=rotary)
        out = given.query.new_empty(given.query.shape)
        self._metadata.attend(index, given, self._kv_cache, out)
        return out.flatten(1)
