"""Gathers cached keys and values into contiguous tensors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.triton.tuning import next_power_of_two

__all__ = ["gather_blocks"]

_TILE_KEYS = 16
_TILE_ELEMENTS = 256


@triton.jit(do_not_specialize=["table_stride"])
def _gather_tokens(
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    tables: tl.tensor,
    starts: tl.tensor,
    cu_lens: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    is_scaled: tl.constexpr,
    block_size: tl.constexpr,
    token_size: tl.constexpr,
    tile_keys: tl.constexpr,
    tile_elements: tl.constexpr,
) -> None:
    """Copy `tile_elements` elements of `tile_keys` keys and values of one sequence.

    Launched by `gather_blocks`; grid `(tiles of keys, tiles of a token, num_sequences)`. Pointers:
    key_cache, value_cache `[num_blocks, block_size, token_size]` of the model's dtype or fp8; key,
    value `[num_tokens, token_size]`; tables `[B, width]` int32; starts `[B]` int32; cu_lens
    `[B + 1]` int32.
    """
    sequence = tl.program_id(2)
    first_token = tl.load(cu_lens + sequence)
    num_keys = tl.load(cu_lens + sequence + 1) - first_token
    first_key = tl.program_id(0) * tile_keys
    if first_key >= num_keys:
        return
    keys = first_key + tl.arange(0, tile_keys)
    is_key = keys < num_keys
    positions = tl.load(starts + sequence) + keys
    table = tables + sequence.to(tl.int64) * table_stride
    blocks = tl.load(table + positions // block_size, mask=is_key, other=0).to(tl.int64)
    elements = tl.program_id(1) * tile_elements + tl.arange(0, tile_elements)
    mask = is_key[:, None] & (elements[None, :] < token_size)
    cached = blocks * block_stride + positions % block_size * token_size
    gathered = (first_token + keys).to(tl.int64) * token_size
    k = tl.load(key_cache + cached[:, None] + elements[None, :], mask=mask)
    v = tl.load(value_cache + cached[:, None] + elements[None, :], mask=mask)
    if is_scaled:
        k = k.to(tl.float32) * k_scale
        v = v.to(tl.float32) * v_scale
    out = gathered[:, None] + elements[None, :]
    tl.store(key + out, k.to(key.dtype.element_ty), mask=mask)
    tl.store(value + out, v.to(value.dtype.element_ty), mask=mask)


def gather_blocks(
    layer_cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    cu_lens: torch.Tensor,
    max_len: int,
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Copy the keys from `starts[b]` on of each sequence to `key`, and the values to `value`.

    Sequence `b` fills the tokens `cu_lens[b]` to `cu_lens[b + 1]` of `[num_tokens, num_kv_heads,
    head_size]`, multiplied by the scales; none has more keys than `max_len`. `starts`
    is int32 `[B]`, `cu_lens` int32 `[B + 1]`, `block_tables` int32 `[B, width]`; `layer_cache` is
    `[num_blocks, 2, block_size, num_kv_heads, head_size]`.
    """
    num_sequences = len(starts)
    block_size, num_kv_heads, head_size = layer_cache.shape[2:]
    token_size = num_kv_heads * head_size
    assert block_tables.dtype == starts.dtype == cu_lens.dtype == torch.int32
    assert len(cu_lens) == num_sequences + 1
    assert key.shape[1:] == value.shape[1:] == (num_kv_heads, head_size)
    assert key.is_contiguous()
    assert value.is_contiguous()
    assert layer_cache.stride()[2:] == (token_size, head_size, 1)
    if not num_sequences or not max_len:
        return
    tile_elements = min(_TILE_ELEMENTS, next_power_of_two(token_size))
    grid = triton.cdiv(max_len, _TILE_KEYS), triton.cdiv(token_size, tile_elements), num_sequences
    _gather_tokens[grid](
        layer_cache[:, 0],
        layer_cache[:, 1],
        key,
        value,
        block_tables,
        starts,
        cu_lens,
        layer_cache.stride(0),
        block_tables.stride(0),
        k_scale,
        v_scale,
        is_scaled=(k_scale, v_scale) != (1.0, 1.0),
        block_size=block_size,
        token_size=token_size,
        tile_keys=_TILE_KEYS,
        tile_elements=tile_elements,
        num_warps=4,
    )
