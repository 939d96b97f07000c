"""Quantizes rows to float8_e4m3fn, for products on tensor cores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.arguments import QuantizedRows
from attention.kernels.triton.kernel_launcher import dependent_launch, wait_for_inputs
from attention.kernels.triton.tuning import next_power_of_two

__all__ = ["empty_quantized", "quantize_blocks", "quantize_rows", "store_quantized"]

ROW_STEP = 128
_FP8_MAX = tl.constexpr(448.0)
_BLOCKS_PER_PROGRAM = 32


@triton.jit
def store_quantized(
    values: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    elements: tl.tensor,
    size: tl.constexpr,
) -> None:
    """Write one row, float32 and zero beyond its size, with a scale of its own.

    Pointers: out `[num_rows, size]` in fp8, scales `[num_rows]` float32.
    """
    scale = tl.max(tl.abs(values), axis=0) / _FP8_MAX
    # A row of zeros may have any scale but 0.
    scale = tl.where(scale == 0.0, 1.0, scale)
    _store_scaled(values, scale, out, scales, row, elements, size)


@triton.jit
def _store_scaled(
    values: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    elements: tl.tensor,
    size: tl.constexpr,
) -> None:
    scaled = tl.minimum(tl.maximum(values / scale, -_FP8_MAX), _FP8_MAX)
    tl.store(out + row * size + elements, scaled.to(out.dtype.element_ty), mask=elements < size)
    tl.store(scales + row, scale)


@triton.jit
def _quantize_rows(
    x: tl.tensor,
    input_scale: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    row_stride: tl.tensor,
    size: tl.constexpr,
    has_input_scale: tl.constexpr,
    is_dependent: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write one row and its scale.

    Launched by `quantize_rows`; grid `(num_rows,)`. Pointers: x, out `[num_rows, size]`;
    input_scale `[1]` and scales `[num_rows]`, float32.
    """
    wait_for_inputs(is_dependent)
    row = tl.program_id(0).to(tl.int64)
    elements = tl.arange(0, tile)
    is_element = elements < size
    values = tl.load(x + row * row_stride + elements, mask=is_element, other=0.0).to(tl.float32)
    if has_input_scale:
        _store_scaled(values, tl.load(input_scale), out, scales, row, elements, size)
    else:
        store_quantized(values, out, scales, row, elements, size)


def empty_quantized(
    num_rows: int, size: int, *, dtype: torch.dtype, device: torch.device
) -> QuantizedRows:
    """Return uninitialized rows of this size, of inputs in `dtype`.

    Memory of more rows follows, up to a multiple of `ROW_STEP`, so that tiles of this many rows can
    be loaded whole: bulk copies of tiles that end outside a tensor take longer.
    """
    num_allocated = -(-num_rows // ROW_STEP) * ROW_STEP
    values = torch.empty((num_allocated, size), dtype=torch.float8_e4m3fn, device=device)
    return QuantizedRows(
        values[:num_rows], torch.empty((num_rows, 1), dtype=torch.float32, device=device), dtype
    )


def quantize_rows(x: torch.Tensor, input_scale: torch.Tensor | None) -> QuantizedRows:
    """Quantize the rows of `x`, `[num_rows, size]`, with contiguous columns.

    A row is divided by its scale: `input_scale`, `[1]`, if given, or else the scale that maps the
    largest magnitude of the row to the largest value of the format.
    """
    num_rows, size = x.shape
    assert x.stride(1) == 1
    rows = empty_quantized(num_rows, size, dtype=x.dtype, device=x.device)
    if num_rows:
        tile = next_power_of_two(size)
        _quantize_rows[(num_rows,)](
            x,
            rows.scales if input_scale is None else input_scale,
            rows.values,
            rows.scales,
            x.stride(0),
            size=size,
            has_input_scale=input_scale is not None,
            tile=tile,
            num_warps=min(16, max(4, tile // 512)),
            **dependent_launch(x.device),
        )
    return rows


@triton.jit
def _quantize_blocks(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    row_stride: tl.tensor,
    size: tl.constexpr,
    num_blocks: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_blocks: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    """Write some blocks of one row and their scales.

    Launched by `quantize_blocks`; grid `(num_rows, tiles of blocks)`. Pointers: x, out
    `[num_rows, size]`; scales `[num_rows, num_blocks]` float32.
    """
    wait_for_inputs(is_dependent)
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * tile_blocks + tl.arange(0, tile_blocks)
    elements = blocks[:, None] * depth + tl.arange(0, depth)[None, :]
    is_element = elements < size
    values = tl.load(x + row * row_stride + elements, mask=is_element, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(values), axis=1) / _FP8_MAX
    # A block of zeros has any scale.
    scale = tl.where(scale == 0.0, 1.0, scale)
    scaled = tl.minimum(tl.maximum(values / scale[:, None], -_FP8_MAX), _FP8_MAX)
    tl.store(out + row * size + elements, scaled.to(out.dtype.element_ty), mask=is_element)
    tl.store(scales + row * num_blocks + blocks, scale, mask=blocks < num_blocks)


def quantize_blocks(x: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[num_rows, size]` in float8_e4m3fn, with a scale for each block of `depth` elements.

    The scales are `[num_rows, size / depth]` float32, rounded up. `depth` is a power of two.
    """
    num_rows, size = x.shape
    assert x.stride(1) == 1
    num_blocks = triton.cdiv(size, depth)
    out = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=x.device)
    if num_rows:
        tile_blocks = min(_BLOCKS_PER_PROGRAM, next_power_of_two(num_blocks))
        _quantize_blocks[(num_rows, triton.cdiv(num_blocks, tile_blocks))](
            x,
            out,
            scales,
            x.stride(0),
            size=size,
            num_blocks=num_blocks,
            tile_blocks=tile_blocks,
            depth=depth,
            num_warps=4,
            **dependent_launch(x.device),
        )
    return out, scales
