"""Options and tile sizes of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

__all__ = [
    "AttentionOptions",
    "PagedAttentionTuning",
    "default_chunk_tuning",
    "default_decode_tuning",
    "dot_type",
    "next_power_of_two",
]

_MIN_VECTORS = 16
"""The smallest matrix product of tensor cores."""
_MANY_SUMS = 128 * 256
"""From here on, the sums of a program in float32 take half of the registers of 8 warps."""
_DOT_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttentionTuning:
    """How the work is tiled. Results differ by rounding only."""

    tile_vectors: int
    """Query vectors of a program, a power of two from 16; one head of one query each."""
    tile_keys: int
    """Keys per iteration of a program's loop, a power of two from 16."""
    num_warps: int
    num_stages: int
    """Tiles of keys in flight, including the current tile."""


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least a positive number."""
    return 1 << (number - 1).bit_length()


def default_chunk_tuning(
    *, num_queries_per_kv: int, head_size: int, dtype: torch.dtype, max_query_len: int
) -> PagedAttentionTuning:
    """Return the tuning of chunks and prefills; `dtype` is that of the queries."""
    if dtype == torch.float32:
        # Without tensor cores the operands are in registers, where larger tiles spill.
        most_vectors, tile_keys, num_stages = 32, 16, 2
    elif head_size <= 128:
        most_vectors, tile_keys, num_stages = 128, 32, 3
    elif head_size <= 256:
        most_vectors, tile_keys, num_stages = 128, 32, 2
    else:
        # Shared memory holds no more queries beside two tiles of keys and values.
        most_vectors, tile_keys, num_stages = 64, 32, 2
    wanted = next_power_of_two(max_query_len * num_queries_per_kv)
    tile_vectors = max(min(most_vectors, wanted), _fewest_vectors(num_queries_per_kv))
    is_large = tile_vectors * next_power_of_two(head_size) >= _MANY_SUMS
    return PagedAttentionTuning(
        tile_vectors=tile_vectors,
        tile_keys=tile_keys,
        num_warps=8 if dtype == torch.float32 or is_large else 4,
        num_stages=num_stages,
    )


def default_decode_tuning(
    *, num_queries_per_kv: int, head_size: int, dtype: torch.dtype
) -> PagedAttentionTuning:
    """Return the tuning of decodes; `dtype` is that of the queries."""
    tile_vectors = _fewest_vectors(num_queries_per_kv)
    tile_keys = 64 if head_size <= 128 else 32
    return PagedAttentionTuning(
        tile_vectors=tile_vectors,
        tile_keys=16 if dtype == torch.float32 else tile_keys,
        num_warps=8 if tile_vectors >= 128 else 4,
        num_stages=3 if 128 < head_size <= 256 else 2,
    )


def _fewest_vectors(num_queries_per_kv: int) -> int:
    return max(_MIN_VECTORS, next_power_of_two(num_queries_per_kv))


def dot_type(operand: torch.Tensor) -> tl.dtype:
    """Return the element type of matrix products with an operand, which is that of the operand.

    Triton's interpreter, which runs the kernels on the CPU, cannot multiply bfloat16.
    """
    widens = operand.dtype == torch.bfloat16 and not operand.is_cuda
    return tl.float32 if widens else _DOT_TYPES[operand.dtype]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionOptions:
    """The options of one launch.

    Queries are aligned with the last keys: query `i` of `num_queries` is at position
    `num_keys - num_queries + i`, and sees the keys from `position - window_left` to
    `position + window_right`, inclusive.
    """

    scale: float
    window_left: int = -1
    """Keys that a query sees before its own position; -1 for all."""
    window_right: int
    """Keys that a query sees after its own position: 0 is causal, -1 is all."""
    soft_cap: float | None = None
    """Scores become `cap * tanh(score / cap)`, before bias and mask."""
    alibi_slopes: torch.Tensor | None = None
    """float32, `[num_heads]`; the bias is `-slope * abs(key - query position)`."""
    k_scale: float = 1.0
    """Factor of cached keys."""
    v_scale: float = 1.0
    """Factor of cached values."""

    @property
    def dot_scale(self) -> float:
        """Return the factor from a product of query and key to the exponent's argument.

        That argument is in units of log2(e), or with a soft cap the argument of tanh.
        """
        unit = _LOG2_E if self.soft_cap is None else 1.0 / self.soft_cap
        return self.scale * self.k_scale * unit

    @property
    def cap(self) -> float:
        """Return the soft cap in units of log2(e), or 0 for none."""
        return 0.0 if self.soft_cap is None else self.soft_cap * _LOG2_E
