"""The parameters of attention, of a layer and of a model.

Owns the sharding of heads and the validation of parameters. Does not know any backend.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from pagedray.layout import CacheLayout, cache_layout

__all__ = [
    "KV_CACHE_DTYPES",
    "AttentionParams",
    "AttentionSpec",
    "AttentionType",
    "StateTensor",
    "cache_dtype",
    "problems_of",
    "storage_dtype",
]

_STATE_ALIGNMENT = 16
"""Bytes, of which the offset of each tensor in a state is a multiple."""
KV_CACHE_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class AttentionType(StrEnum):
    """Which tokens see which; determines the lengths, the block table and the mask."""

    DECODER = "decoder"
    """Causal self attention through the KV cache."""

    ENCODER = "encoder"
    """Self attention of the encoder of an encoder-decoder model; neither causal nor cached."""

    ENCODER_ONLY = "encoder_only"
    """Self attention of an encoder-only model; neither causal nor cached."""

    ENCODER_DECODER = "encoder_decoder"
    """Queries of the decoder over the cached keys and values of the encoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """Parameters of one layer. Layers with equal parameters share one plan per step."""

    num_heads: int
    num_kv_heads: int
    """Query head `h` reads KV head `h // num_queries_per_kv`."""
    head_size: int
    scale: float
    sliding_window: int | None = None
    """A query sees keys at a smaller distance: in a decoder that many keys, including its own, and
    in an encoder also the keys after it; None for all."""
    soft_cap: float | None = None
    """Scores become `cap * tanh(score / cap)` before bias and mask; None for no cap."""
    alibi_slopes: tuple[float, ...] | None = None
    """One slope per query head of this rank; the bias is `-slope * |key - query position|`."""
    has_sinks: bool = False
    """Whether each query head has a sink: a score that counts in the softmax and has no value."""
    kv_cache_dtype: str = "auto"
    """Element type of the cache, one of `KV_CACHE_DTYPES`; "auto" is the model's."""
    k_scale: float = 1.0
    v_scale: float = 1.0
    """Factors of cached fp8 keys and values when they are read."""
    attention_type: AttentionType = AttentionType.DECODER

    @property
    def num_queries_per_kv(self) -> int:
        """Return the number of query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def has_plain_softmax(self) -> bool:
        """Return whether the softmax is that of the scaled scores and a bias."""
        return self.soft_cap is None and not self.has_sinks

    @property
    def is_causal(self) -> bool:
        """Return whether a query sees no key after its own position."""
        return self.attention_type is AttentionType.DECODER

    @property
    def is_cached(self) -> bool:
        """Return whether keys and values go through the KV cache."""
        return self.attention_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)

    @property
    def plan_key(self) -> "AttentionParams":
        """Return the parameters that a plan depends on: all but the fp8 scales."""
        return replace(self, k_scale=1.0, v_scale=1.0)

    def block_elements(self, block_size: int) -> int:
        """Return the elements of a layer's keys and values in a block."""
        return 2 * block_size * self.num_kv_heads * self.head_size

    def shard(self, rank: int, num_ranks: int) -> "AttentionParams":
        """Return the part of one tensor-parallel rank: its heads and its slopes.

        KV heads are replicated where there are more ranks than KV heads. Raises ValueError if
        heads cannot be divided.
        """
        if self.num_heads % num_ranks:
            raise ValueError(f"{self.num_heads} heads cannot be divided among {num_ranks} ranks.")
        if self.num_kv_heads % num_ranks and num_ranks % self.num_kv_heads:
            raise ValueError(
                f"{self.num_kv_heads} KV heads can be neither divided among nor replicated to "
                f"{num_ranks} ranks."
            )
        num_heads = self.num_heads // num_ranks
        slopes = self.alibi_slopes
        if slopes is not None:
            slopes = slopes[rank * num_heads : (rank + 1) * num_heads]
        num_kv_heads = max(1, self.num_kv_heads // num_ranks)
        return replace(self, num_heads=num_heads, num_kv_heads=num_kv_heads, alibi_slopes=slopes)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A part of the state that a recurrent layer keeps of each sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the bytes, padding included."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return -(-num_bytes // _STATE_ALIGNMENT) * _STATE_ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The configuration that a backend is checked and built for."""

    layers: tuple[AttentionParams, ...]
    """One entry per attention layer of this rank; `layer_index` counts them."""
    dtype: torch.dtype
    device: torch.device
    block_size: int
    max_seq_len: int | None = None
    """Tokens of the longest sequence; required for captured graphs."""
    layout: CacheLayout | None = None
    """The groups of the cached layers, each with block tables of its own; None is a single group
    of all layers, which keeps the keys of all tokens."""
    states: tuple[tuple[StateTensor, ...], ...] = ()
    """The state of each recurrent layer; empty if there are no such layers."""

    def grouped(self) -> "AttentionSpec":
        """Return the spec with layers in groups, so that each window frees its own blocks.

        Layers that see all tokens, or the tokens of one window, and have one shape stay together.
        """
        cached = [layer for layer in self.layers if layer.is_cached]
        if any(layer.attention_type is not AttentionType.DECODER for layer in cached):
            return self
        longest = math.inf if self.max_seq_len is None else self.max_seq_len
        windows = [
            None if (window := layer.sliding_window) is None or window >= longest else window
            for layer in cached
        ]
        sizes = [layer.block_elements(self.block_size) for layer in cached]
        layout = cache_layout(windows, self.block_size, sizes)
        return self if layout.windows == (None,) else replace(self, layout=layout)

    @property
    def group_windows(self) -> tuple[int | None, ...]:
        """Return the window behind which each group frees its blocks, None for no window."""
        return (None,) if self.layout is None else self.layout.windows

    @property
    def cache_groups(self) -> tuple[int, ...]:
        """Return the group of each layer; layers without a cache are in group 0."""
        return tuple(group for group, _ in self._places)

    @property
    def cache_layers(self) -> tuple[int | None, ...]:
        """Return the place of each layer on the layer axis of the cache, None if it has no cache.

        Layers of different groups may have the same place, and so do the k-th layer of self
        attention and the k-th of cross attention: all blocks come from one pool, and the block
        tables are disjoint.
        """
        return tuple(place for _, place in self._places)

    @property
    def _places(self) -> list[tuple[int, int | None]]:
        """Return the group of each layer, and its place in the blocks of the group."""
        if self.layout is None:
            counts = Counter[AttentionType]()
            places: list[tuple[int, int | None]] = []
            for layer in self.layers:
                kind = layer.attention_type
                places.append((0, counts[kind] if layer.is_cached else None))
                counts[kind] += 1
            return places
        cached = [i for i, layer in enumerate(self.layers) if layer.is_cached]
        places = [(0, None)] * len(self.layers)
        for index, group in enumerate(self.layout.groups):
            for place, layer_index in enumerate(group.layers):
                places[cached[layer_index]] = index, place
        return places

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Return the shape of a block: `[num_layers, 2, block_size, num_kv_heads, head_size]`.

        Layers of several shapes have blocks of one dimension, in which each layer has its own view.
        """
        shapes = {(layer.num_kv_heads, layer.head_size) for layer in self.layers}
        if len(shapes) > 1:
            return (self.block_elements,)
        (shape,) = shapes
        num_layers = max((place + 1 for place in self.cache_layers if place is not None), default=0)
        return (num_layers, 2, self.block_size, *shape)

    @property
    def block_elements(self) -> int:
        """Return the elements of a block, a multiple of the elements of every layer."""
        needed = [
            (place + 1) * layer.block_elements(self.block_size)
            for layer, place in zip(self.layers, self.cache_layers, strict=True)
            if place is not None
        ]
        unit = math.lcm(*(layer.block_elements(self.block_size) for layer in self.layers))
        return -(-max(needed, default=0) // unit) * unit

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block."""
        return self.block_elements * self.cache_dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the state of a sequence in all recurrent layers."""
        return sum(tensor.num_bytes for layer in self.states for tensor in layer)

    @property
    def state_blocks(self) -> int:
        """Return the blocks that hold the state of a sequence."""
        return -(-self.state_bytes // self.block_bytes)

    def state_views(self, states: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Return the tensors of each recurrent layer, `[num_rows, *StateTensor.shape]`, strided.

        `states` are the bytes of the states of rows, `[num_rows, num_bytes]` uint8, at least
        `state_bytes` each.
        """
        views, first = [], 0
        for layer in self.states:
            tensors = []
            for tensor in layer:
                end = first + math.prod(tensor.shape) * tensor.dtype.itemsize
                part = states[:, first:end].view(tensor.dtype)
                tensors.append(part.unflatten(1, tensor.shape))
                first += tensor.num_bytes
            views.append(tuple(tensors))
        return tuple(views)

    @property
    def cache_dtype(self) -> torch.dtype:
        """Return the element type of the cache; fp8 is stored as `torch.uint8`."""
        return cache_dtype(self.layers[0].kv_cache_dtype, self.dtype)


def cache_dtype(kv_cache_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return the element type of a cache by its name; raise ValueError if it is unknown."""
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(_unknown_cache_dtype(kv_cache_dtype))
    return KV_CACHE_DTYPES[kv_cache_dtype] or model_dtype


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a cache tensor: torch cannot index fp8, only bytes."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


def problems_of(spec: AttentionSpec) -> list[str]:
    """Return every reason why a spec is invalid for all backends."""
    problems = []
    if spec.block_size < 1:
        problems.append(f"block_size is {spec.block_size}, but must be at least 1")
    if not spec.layers:
        problems.append("there are no layers")
    for index in set(spec.cache_groups):
        shapes = {
            (layer.num_kv_heads, layer.head_size)
            for layer, group in zip(spec.layers, spec.cache_groups, strict=True)
            if group == index
        }
        if len(shapes) > 1:
            problems.append(
                "layers share the blocks of a cache, but differ in (num_kv_heads, head_size): "
                f"{sorted(shapes)}"
            )
    if len({layer.kv_cache_dtype for layer in spec.layers}) > 1:
        problems.append("all layers share one cache, but differ in kv_cache_dtype")
    for params in dict.fromkeys(spec.layers):
        problems.extend(_problems_of_layer(params))
    return list(dict.fromkeys(problems))


def _problems_of_layer(params: AttentionParams) -> Iterator[str]:
    for name in ("num_heads", "num_kv_heads", "head_size"):
        if getattr(params, name) < 1:
            yield f"{name} is {getattr(params, name)}, but must be at least 1"
    if params.num_kv_heads > 0 and params.num_heads % params.num_kv_heads:
        yield (
            f"num_heads {params.num_heads} is not a multiple of num_kv_heads {params.num_kv_heads}"
        )
    if not math.isfinite(params.scale):
        yield f"scale is {params.scale}, but must be finite"
    if params.sliding_window is not None and params.sliding_window < 1:
        yield f"sliding_window is {params.sliding_window}, but must be at least 1 or None"
    if params.soft_cap is not None and not 0 < params.soft_cap < math.inf:
        yield f"soft_cap is {params.soft_cap}, but must be positive and finite, or None"
    slopes = params.alibi_slopes
    if slopes is not None and len(slopes) != params.num_heads:
        yield f"there are {len(slopes)} ALiBi slopes for {params.num_heads} heads"
    if slopes is not None and not all(math.isfinite(slope) for slope in slopes):
        yield "an ALiBi slope is not finite"
    if params.kv_cache_dtype not in KV_CACHE_DTYPES:
        yield _unknown_cache_dtype(params.kv_cache_dtype)
    for name in ("k_scale", "v_scale"):
        if not 0 < getattr(params, name) < math.inf:
            yield f"{name} is {getattr(params, name)}, but must be positive and finite"
    if params.attention_type is AttentionType.ENCODER_DECODER:
        # Positions of an encoder and a decoder have no distance.
        if params.sliding_window is not None:
            yield "cross attention has no sliding window"
        if slopes is not None:
            yield "cross attention has no ALiBi"


def _unknown_cache_dtype(name: str) -> str:
    return f"kv_cache_dtype is {name}, but must be one of {', '.join(KV_CACHE_DTYPES)}"
