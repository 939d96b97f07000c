"""Tile sizes of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = [
    "PagedAttentionTuning",
    "default_chunk_tuning",
    "default_decode_tuning",
    "next_power_of_two",
]

_MIN_VECTORS = 16
"""The smallest matrix product of tensor cores."""


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
    is_wide = head_size > 128
    if dtype == torch.float32:
        # Without tensor cores the operands are in registers, where larger tiles spill.
        most_vectors, tile_keys, num_stages = 32, 16, 2
    elif not is_wide:
        most_vectors, tile_keys, num_stages = 128, 32, 3
    else:
        most_vectors, tile_keys, num_stages = 128, 32, 2
    wanted = next_power_of_two(max_query_len * num_queries_per_kv)
    tile_vectors = max(min(most_vectors, wanted), _fewest_vectors(num_queries_per_kv))
    return PagedAttentionTuning(
        tile_vectors=tile_vectors,
        tile_keys=tile_keys,
        num_warps=8 if dtype == torch.float32 or (is_wide and tile_vectors >= 128) else 4,
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
        num_stages=2 if head_size <= 128 else 3,
    )


def _fewest_vectors(num_queries_per_kv: int) -> int:
    return max(_MIN_VECTORS, next_power_of_two(num_queries_per_kv))
