"""What a backend is asked for: parameters of a layer and of a whole model.

Owns the sharding of heads and the check that parameters make sense. Does not know any backend.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

__all__ = ["AttentionParams", "AttentionSpec", "AttentionType", "problems_of"]


class AttentionType(StrEnum):
    """Which tokens see which: the lengths, the block table and the mask follow from it."""

    DECODER = "decoder"
    """Causal self attention through the KV cache."""

    ENCODER = "encoder"
    """Self attention of an encoder beside a decoder; neither causal nor cached."""

    ENCODER_ONLY = "encoder_only"
    """Self attention of a model without decoder; neither causal nor cached."""

    ENCODER_DECODER = "encoder_decoder"
    """Queries of the decoder over the cached keys and values of the encoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """What one layer computes. Layers with equal parameters share one plan per step."""

    num_heads: int
    num_kv_heads: int
    """Query head `h` reads KV head `h // group_size`."""
    head_size: int
    scale: float
    sliding_window: int | None = None
    """Number of keys that a query sees, its own included; None for all."""
    soft_cap: float | None = None
    """Scores become `cap * tanh(score / cap)` before bias and mask; None for no cap."""
    alibi_slopes: tuple[float, ...] | None = None
    """One slope per query head of this rank; the bias is `slope * (key - query position)`."""
    kv_cache_dtype: str = "auto"
    """Element type of the cache; "auto" is the model's."""
    attention_type: AttentionType = AttentionType.DECODER

    @property
    def group_size(self) -> int:
        """Return the number of query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def shard(self, rank: int, num_ranks: int) -> "AttentionParams":
        """Return the part of one tensor-parallel rank: its heads and its slopes.

        KV heads are replicated where there are more ranks than KV heads.
        """
        if self.num_heads % num_ranks:
            raise ValueError(f"{self.num_heads} heads do not divide over {num_ranks} ranks.")
        if self.num_kv_heads % num_ranks and num_ranks % self.num_kv_heads:
            raise ValueError(f"{self.num_kv_heads} KV heads do not fit {num_ranks} ranks.")
        num_heads = self.num_heads // num_ranks
        slopes = self.alibi_slopes
        if slopes is not None:
            slopes = slopes[rank * num_heads : (rank + 1) * num_heads]
        num_kv_heads = max(1, self.num_kv_heads // num_ranks)
        return replace(self, num_heads=num_heads, num_kv_heads=num_kv_heads, alibi_slopes=slopes)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """All that a backend must know before anything is loaded."""

    layers: tuple[AttentionParams, ...]
    """One entry per layer of this rank, in the order of the cache's layer axis."""
    dtype: torch.dtype
    device: torch.device
    block_size: int


def problems_of(spec: AttentionSpec) -> list[str]:
    """Return every reason why a spec makes no sense for any backend."""
    problems = []
    if spec.block_size < 1:
        problems.append(f"block_size is {spec.block_size}, but must be at least 1")
    if not spec.layers:
        problems.append("there are no layers")
    shapes = {(layer.num_kv_heads, layer.head_size) for layer in spec.layers}
    if len(shapes) > 1:
        problems.append(
            f"all layers share one cache, but differ in (num_kv_heads, head_size): {sorted(shapes)}"
        )
    for params in dict.fromkeys(spec.layers):
        problems.extend(_problems_of_layer(params))
    return list(dict.fromkeys(problems))


def _problems_of_layer(params: AttentionParams) -> Iterator[str]:
    for name in ("num_heads", "num_kv_heads", "head_size"):
        if getattr(params, name) < 1:
            yield f"{name} is {getattr(params, name)}, but must be at least 1"
    if params.num_kv_heads > 0 and params.num_heads % params.num_kv_heads:
        yield f"num_heads {params.num_heads} is no multiple of num_kv_heads {params.num_kv_heads}"
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
