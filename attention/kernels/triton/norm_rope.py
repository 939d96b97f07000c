"""Norms and rotary embeddings of token rows: work between the GEMMs of a layer.

Each kernel reads its rows once and computes in float32, where torch would run several kernels that
read and round them in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from attention.kernels.triton.fp8_rows import empty_quantized, store_quantized
from attention.kernels.triton.kernel_launcher import (
    KernelLauncher,
    can_depend,
    launch_options,
    wait_for_inputs,
)
from attention.kernels.triton.tuning import next_power_of_two

if TYPE_CHECKING:
    from attention.kernels.arguments import QuantizedRows

__all__ = [
    "add_norm",
    "add_parts_norm",
    "norm_heads",
    "quantized_add_norm",
    "rotate_heads",
    "rotated",
    "rotated_pairs",
]

_HEADS_PER_PROGRAM = 8


@triton.jit
def _add_norm(
    stream: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    stream_stride: tl.tensor,
    delta_stride: tl.tensor,
    eps: tl.tensor,
    size: tl.constexpr,
    num_parts: tl.constexpr,
    has_bias: tl.constexpr,
    is_centered: tl.constexpr,
    is_quantized: tl.constexpr,
    is_dependent: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Add delta to one row of the residual stream in place, and write its norm.

    Launched by `add_norm`, `add_parts_norm` and `quantized_add_norm`; grid `(num_rows,)`. Pointers:
    stream, out `[num_rows, size]`; delta `[num_parts, num_rows, size]`, float32 if it has several
    parts; weight, bias `[size]`; scales `[num_rows]` float32 if `is_quantized`. All others are of
    the model's dtype, but `out` in fp8 if `is_quantized`.
    """
    wait_for_inputs(is_dependent)
    row = tl.program_id(0).to(tl.int64)
    elements = tl.arange(0, tile)
    is_element = elements < size
    kept = tl.load(stream + row * stream_stride + elements, mask=is_element, other=0.0)
    if num_parts > 0:
        added = tl.load(delta + row * delta_stride + elements, mask=is_element, other=0.0)
        added = added.to(tl.float32)
        for part in tl.static_range(1, num_parts):
            place = (part * tl.num_programs(0) + row) * delta_stride
            added += tl.load(delta + place + elements, mask=is_element, other=0.0)
        kept = (kept.to(tl.float32) + added).to(stream.dtype.element_ty)
        tl.store(stream + row * stream_stride + elements, kept, mask=is_element)
    x = kept.to(tl.float32)
    if is_centered:
        x = tl.where(is_element, x - tl.sum(x, axis=0) / size, 0.0)
    normed = x / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)
    normed *= tl.load(weight + elements, mask=is_element, other=0.0).to(tl.float32)
    if has_bias:
        normed += tl.load(bias + elements, mask=is_element, other=0.0).to(tl.float32)
    normed = normed.to(stream.dtype.element_ty)
    if is_quantized:
        store_quantized(normed.to(tl.float32), out, scales, row, elements, size)
    else:
        tl.store(out + row * size + elements, normed, mask=is_element)


_ADD_NORM = KernelLauncher(_add_norm)


def add_norm(
    stream: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    is_centered: bool,
    overlaps: bool = False,
) -> torch.Tensor:
    """Return the norm of `stream + delta`, `[num_rows, size]`; `stream` becomes that sum.

    The norm is RMSNorm, or LayerNorm if `is_centered`, which subtracts the mean. With `overlaps`,
    it starts while the kernel before it ends, which must be of the same stream: not one of NCCL.
    """
    out = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
    _launch_add_norm(
        stream, delta, weight, bias, eps, out, None, is_centered=is_centered, overlaps=overlaps
    )
    return out


def add_parts_norm(
    stream: torch.Tensor,
    parts: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    is_centered: bool,
    overlaps: bool = False,
) -> torch.Tensor:
    """Compute `add_norm` for the sum of some parts.

    `parts` is `[num_parts, num_rows, size]` float32 and contiguous.
    """
    assert parts.dtype == torch.float32
    assert parts.is_contiguous()
    out = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
    _launch_add_norm(
        stream,
        parts[0],
        weight,
        bias,
        eps,
        out,
        None,
        num_parts=len(parts),
        is_centered=is_centered,
        overlaps=overlaps,
    )
    return out


def quantized_add_norm(
    stream: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    is_centered: bool,
    overlaps: bool = False,
) -> QuantizedRows:
    """Compute `quantize_rows(add_norm(...))` by one kernel."""
    rows = empty_quantized(*stream.shape, dtype=stream.dtype, device=stream.device)
    _launch_add_norm(
        stream,
        delta,
        weight,
        bias,
        eps,
        rows.values,
        rows.scales,
        is_centered=is_centered,
        overlaps=overlaps,
    )
    return rows


def _launch_add_norm(
    stream: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    *,
    num_parts: int = 1,
    is_centered: bool,
    overlaps: bool,
) -> None:
    """Launch the kernel; `delta` is the first of the adjacent parts."""
    num_rows, size = stream.shape
    assert stream.stride(1) == 1
    assert delta is None or (delta.shape == stream.shape and delta.stride(1) == 1)
    if num_rows:
        tile = next_power_of_two(size)
        _ADD_NORM.launch(
            (num_rows, 1, 1),
            (
                stream,
                stream if delta is None else delta,
                weight,
                weight if bias is None else bias,
                out,
                out if scales is None else scales,
            ),
            (
                stream.stride(0),
                0 if delta is None else delta.stride(0),
                eps,
                size,
                0 if delta is None else num_parts,
                bias is not None,
                is_centered,
                scales is not None,
                can_depend(stream.device),
                tile,
            ),
            num_warps=min(16, max(4, tile // 512)),
            **(launch_options(stream.device) if overlaps else {}),
        )


@triton.jit
def _norm_heads(
    heads: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    token_stride: tl.tensor,
    eps: tl.tensor,
    num_heads: tl.constexpr,
    head_size: tl.constexpr,
    is_dependent: tl.constexpr,
    head_tile: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write the norms of `head_tile` heads of one token.

    Launched by `norm_heads`; grid `(num_tokens, tiles of heads)`. Pointers: heads, out
    `[num_tokens, num_heads, head_size]`; weight `[num_heads, head_size]`.
    """
    wait_for_inputs(is_dependent)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * head_tile + tl.arange(0, head_tile)
    elements = tl.arange(0, tile)
    mask = (head[:, None] < num_heads) & (elements[None, :] < head_size)
    offsets = head[:, None] * head_size + elements[None, :]
    x = tl.load(heads + token * token_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    normed = x / tl.sqrt(tl.sum(x * x, axis=1) / head_size + eps)[:, None]
    normed *= tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    offsets += token * num_heads * head_size
    tl.store(out + offsets, normed.to(out.dtype.element_ty), mask=mask)


_NORM_HEADS = KernelLauncher(_norm_heads)


def norm_heads(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm of each head, `[num_tokens, num_heads, head_size]`.

    `weight` is `[num_heads, head_size]`; tokens may be strided, their heads may not.
    """
    num_tokens, num_heads, head_size = heads.shape
    assert heads.stride()[1:] == (head_size, 1)
    assert weight.shape == (num_heads, head_size)
    assert weight.is_contiguous()
    out = torch.empty((num_tokens, num_heads, head_size), dtype=heads.dtype, device=heads.device)
    if num_tokens:
        _NORM_HEADS.launch(
            (num_tokens, triton.cdiv(num_heads, _HEADS_PER_PROGRAM), 1),
            (heads, weight, out),
            (
                heads.stride(0),
                eps,
                num_heads,
                head_size,
                can_depend(heads.device),
                _HEADS_PER_PROGRAM,
                next_power_of_two(head_size),
            ),
            num_warps=4,
            **launch_options(heads.device),
        )
    return out


@triton.jit
def _rotate_heads(
    heads: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    token_stride: tl.tensor,
    num_heads: tl.constexpr,
    head_stride: tl.constexpr,
    half: tl.constexpr,
    is_dependent: tl.constexpr,
    head_tile: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Rotate `head_tile` heads of one token in place.

    Launched by `rotate_heads`; grid `(num_tokens, tiles of heads)`. Pointers: heads
    `[num_tokens, num_heads, 2 * half]`; positions `[num_tokens]` int64; table
    `[num_positions, 2 * half]` float32, cosines, then sines.
    """
    wait_for_inputs(is_dependent)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * head_tile + tl.arange(0, head_tile)
    pairs = tl.arange(0, tile)
    is_pair = pairs < half
    entries = table + tl.load(positions + token) * (2 * half) + pairs
    cos = tl.load(entries, mask=is_pair, other=0.0)[None, :]
    sin = tl.load(entries + half, mask=is_pair, other=0.0)[None, :]
    mask = (head[:, None] < num_heads) & is_pair[None, :]
    places = heads + token * token_stride + head[:, None] * head_stride + pairs[None, :]
    first = tl.load(places, mask=mask, other=0.0)
    second = tl.load(places + half, mask=mask, other=0.0)
    rotated_first, rotated_second = rotated_pairs(first, second, cos, sin)
    tl.store(places, rotated_first.to(first.dtype), mask=mask)
    tl.store(places + half, rotated_second.to(first.dtype), mask=mask)


_ROTATE_HEADS = KernelLauncher(_rotate_heads)


def rotate_heads(heads: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    """Apply rotary embeddings to `[num_tokens, num_heads, head_size]` in place.

    Element i is paired with i + head_size / 2. `positions` is int64 `[num_tokens]`; `table` is
    `[num_positions, head_size]` float32: cosines, then sines, of each pair. Tokens and heads may
    be strided.
    """
    num_tokens, num_heads, head_size = heads.shape
    assert heads.stride(2) == 1
    assert table.shape[1] == head_size
    assert table.is_contiguous()
    if num_tokens:
        _ROTATE_HEADS.launch(
            (num_tokens, triton.cdiv(num_heads, _HEADS_PER_PROGRAM), 1),
            (heads, positions, table),
            (
                heads.stride(0),
                num_heads,
                heads.stride(1),
                head_size // 2,
                can_depend(heads.device),
                _HEADS_PER_PROGRAM,
                next_power_of_two(head_size // 2),
            ),
            num_warps=4,
            **launch_options(heads.device),
        )


@triton.jit
def rotated(own: tl.tensor, partner: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tensor:
    """Return rotated elements, given the partner of each element, all in float32.

    For the first element of each pair, the partner or the sine must be negated.
    """
    # Left to itself, the compiler fuses one product or the other, which are rounded differently.
    return tl.fma(own, cos, partner * sin)


@triton.jit
def rotated_pairs(
    first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the rotated first and second elements of pairs, in float32."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    return rotated(first, -second, cos, sin), rotated(second, first, cos, sin)
