"""Writes the keys and values of a step into the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.triton.kernel_launcher import (
    KernelLauncher,
    can_depend,
    launch_options,
    wait_for_inputs,
)
from attention.kernels.triton.tuning import next_power_of_two

__all__ = ["cache_write"]

_TILE = 1024
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@triton.jit
def _quotient(element: tl.tensor, scale: tl.tensor, largest: tl.constexpr) -> tl.tensor:
    """Return elements over their scale in float32, saturated at `largest` unless that is 0."""
    scaled = tl.div_rn(element.to(tl.float32), scale)
    if largest > 0.0:
        # NaN must stay NaN, so that its request ends with an error; minimum would hide it.
        scaled = tl.where(scaled > largest, largest, scaled)
        scaled = tl.where(scaled < -largest, -largest, scaled)
    return scaled


@triton.jit
def _write_tokens(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slot_mapping: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    block_stride: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    is_scaled: tl.constexpr,
    largest: tl.constexpr,
    block_size: tl.constexpr,
    token_size: tl.constexpr,
    is_dependent: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write `tile` elements of the key and value of one token to its slot.

    Launched by `cache_write`; grid `(num_tokens, tiles of a token)`. Pointers: key, value
    `[num_tokens, token_size]`; key_cache, value_cache `[num_blocks, block_size, token_size]`, of
    the same dtype or fp8; slot_mapping `[num_tokens]` int64.
    """
    wait_for_inputs(is_dependent)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    elements = tl.program_id(1) * tile + tl.arange(0, tile)
    is_element = elements < token_size
    k = tl.load(key + token * key_stride + elements, mask=is_element)
    v = tl.load(value + token * value_stride + elements, mask=is_element)
    if is_scaled:
        k = _quotient(k, tl.zeros([tile], tl.float32) + k_scale, largest)
        v = _quotient(v, tl.zeros([tile], tl.float32) + v_scale, largest)
    offsets = slot // block_size * block_stride + slot % block_size * token_size + elements
    tl.store(key_cache + offsets, k.to(key_cache.dtype.element_ty), mask=is_element)
    tl.store(value_cache + offsets, v.to(value_cache.dtype.element_ty), mask=is_element)


_WRITE_TOKENS = KernelLauncher(_write_tokens)


def cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    layer_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write each token to its slot; `slot_mapping` is int64 `[num_tokens]`, -1 is not written.

    `key` and `value` are `[>= num_tokens, num_kv_heads * head_size]` and may be strided,
    `layer_cache` is `[num_blocks, 2, block_size, num_kv_heads, head_size]`. Elements are stored
    divided by their scale, and saturate in an fp8 cache.
    """
    num_tokens = len(slot_mapping)
    block_size, num_kv_heads, head_size = layer_cache.shape[2:]
    token_size = num_kv_heads * head_size
    assert key.shape[1] == value.shape[1] == token_size
    assert min(len(key), len(value)) >= num_tokens
    assert slot_mapping.dtype == torch.int64
    assert key.stride(1) == value.stride(1) == 1
    assert layer_cache.stride()[2:] == (token_size, head_size, 1)
    if not num_tokens:
        return
    largest = _LARGEST.get(layer_cache.dtype, 0.0)
    tile = min(_TILE, next_power_of_two(token_size))
    _WRITE_TOKENS.launch(
        (num_tokens, triton.cdiv(token_size, tile), 1),
        (key, value, layer_cache[:, 0], layer_cache[:, 1], slot_mapping),
        (
            key.stride(0),
            value.stride(0),
            layer_cache.stride(0),
            k_scale,
            v_scale,
            bool(largest) or (k_scale, v_scale) != (1.0, 1.0),
            largest,
            block_size,
            token_size,
            can_depend(key.device),
            tile,
        ),
        num_warps=4,
        **launch_options(key.device),
    )
