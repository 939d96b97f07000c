"""Rotates the queries and keys of decodes, and writes the keys and values to the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from attention.kernels.triton.kernel_launcher import (
    KernelLauncher,
    can_depend,
    launch_options,
    wait_for_inputs,
)
from attention.kernels.triton.norm_rope import rotated_pairs
from attention.kernels.triton.tuning import next_power_of_two

if TYPE_CHECKING:
    from attention.kernels.arguments import NewTokens

__all__ = ["write_new_tokens"]

_MOST_HEADS = 32
"""Query heads of a program, unless a KV head has more."""


@triton.jit
def _write_new_tokens(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    block_stride: tl.tensor,
    block_size: tl.constexpr,
    num_queries_per_kv: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_size: tl.constexpr,
    is_dependent: tl.constexpr,
    head_tile: tl.constexpr,
    kv_head_tile: tl.constexpr,
) -> None:
    """Rotate queries of a token in place, and write its rotated keys and values.

    Handles `kv_head_tile` KV heads. Launched by `write_new_tokens`; grid `(num_tokens, tiles of KV
    heads)`.
    """
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = head_size // 2
    pairs = tl.arange(0, half)
    entries = table + tl.load(positions + token) * head_size + pairs
    cos = tl.load(entries)[None, :]
    sin = tl.load(entries + half)[None, :]
    slot = tl.load(slots + token)
    # No kernel of a layer writes any of this, so it may be read before the wait.
    wait_for_inputs(is_dependent)

    first_kv_head = tl.program_id(1) * kv_head_tile
    num_here = tl.minimum(num_kv_heads - first_kv_head, kv_head_tile)
    heads = tl.arange(0, head_tile)
    is_head = heads[:, None] < num_here * num_queries_per_kv
    heads += first_kv_head * num_queries_per_kv
    queries = query + token * query_stride + heads[:, None] * head_size + pairs[None, :]
    first = tl.load(queries, mask=is_head, other=0.0)
    second = tl.load(queries + half, mask=is_head, other=0.0)
    kv_heads = first_kv_head + tl.arange(0, kv_head_tile)
    is_written = (kv_heads[:, None] < num_kv_heads) & (slot >= 0)
    offsets = kv_heads[:, None] * head_size + pairs[None, :]
    new_keys = key + token * key_stride + offsets
    first_key = tl.load(new_keys, mask=is_written, other=0.0)
    second_key = tl.load(new_keys + half, mask=is_written, other=0.0)
    new_values = value + token * value_stride + offsets
    first_value = tl.load(new_values, mask=is_written, other=0.0)
    second_value = tl.load(new_values + half, mask=is_written, other=0.0)

    rotated_first, rotated_second = rotated_pairs(first, second, cos, sin)
    tl.store(queries, rotated_first.to(first.dtype), mask=is_head)
    tl.store(queries + half, rotated_second.to(first.dtype), mask=is_head)
    offsets += slot // block_size * block_stride
    offsets += slot % block_size * (num_kv_heads * head_size)
    rotated_first, rotated_second = rotated_pairs(first_key, second_key, cos, sin)
    tl.store(keys + offsets, rotated_first.to(first.dtype), mask=is_written)
    tl.store(keys + offsets + half, rotated_second.to(first.dtype), mask=is_written)
    tl.store(values + offsets, first_value, mask=is_written)
    tl.store(values + offsets + half, second_value, mask=is_written)


_WRITE_NEW_TOKENS = KernelLauncher(_write_new_tokens)


def write_new_tokens(
    query: torch.Tensor, new: NewTokens, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Rotate the queries in place, and write rotated keys and the values to their slots.

    `query` is `[num_tokens, num_heads, head_size]`, and its tokens may be strided. `keys` and
    `values` are the cache of a layer, `[num_blocks, block_size, num_kv_heads, head_size]`. All are
    of one dtype, and `head_size` is a power of two. Results have the bits of `PagedDecode`.
    """
    num_tokens, num_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = keys.shape
    assert query.dtype == new.key.dtype == new.value.dtype == keys.dtype == values.dtype
    assert query.stride()[1:] == new.key.stride()[1:] == new.value.stride()[1:] == (head_size, 1)
    assert keys.stride() == values.stride()
    assert keys.stride()[1:] == (num_kv_heads * head_size, head_size, 1)
    assert head_size == next_power_of_two(head_size) == new.rotary.table.shape[1]
    assert new.rotary.table.is_contiguous()
    assert new.slots.dtype == new.rotary.positions.dtype == torch.int64
    num_queries_per_kv = num_heads // num_kv_heads
    kv_head_tile = 1
    while kv_head_tile < num_kv_heads and 2 * kv_head_tile * num_queries_per_kv <= _MOST_HEADS:
        kv_head_tile *= 2
    _WRITE_NEW_TOKENS.launch(
        (num_tokens, triton.cdiv(num_kv_heads, kv_head_tile), 1),
        (
            query,
            new.key,
            new.value,
            keys,
            values,
            new.slots,
            new.rotary.positions,
            new.rotary.table,
        ),
        (
            query.stride(0),
            new.key.stride(0),
            new.value.stride(0),
            keys.stride(0),
            block_size,
            num_queries_per_kv,
            num_kv_heads,
            head_size,
            can_depend(query.device),
            next_power_of_two(kv_head_tile * num_queries_per_kv),
            kv_head_tile,
        ),
        num_warps=4,
        **launch_options(query.device),
    )
