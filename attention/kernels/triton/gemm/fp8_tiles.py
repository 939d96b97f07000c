"""GEMMs of fp8 rows in small tiles of the output, enough of them for all multiprocessors.

cuBLAS multiplies fp8 rows in tiles of 128 x 128, which leaves most of a GPU idle if a weight has
few columns, and multiplies 128 rows even if there are 32. Smaller tiles take less time until
loading the inputs anew for each tile takes longer than loading the weights. Two programs compute a
tile with many inputs (split-K), and the last of them adds both parts.

Microseconds on one NVIDIA H200 for the weights of a layer of Llama 3 8B, by these kernels and by
cuBLAS: 64 rows 70 and 101, 32 rows 68 and 101.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels.triton.kernel_launcher import dependent_launch, wait_for_inputs

if TYPE_CHECKING:
    from attention.kernels.arguments import QuantizedRows

__all__ = ["Fp8Tiling", "fp8_tiles_gemm", "fp8_tiling", "new_arrivals"]

_TILE_COLUMNS = 64
_MANY_INPUTS = 8192
"""From here on, two programs compute a tile if there are multiprocessors for both."""
_LEAST_BUSY = 0.8
"""The share of the multiprocessors that must have a tile, on average over all turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Tiling:
    """How a product is divided among programs."""

    tile_rows: int
    tile_depth: int
    """Elements of a row per iteration."""
    num_stages: int
    """Stages of the software pipeline."""
    num_parts: int = 1
    """Programs that compute one tile, each from a part of the inputs."""


def fp8_tiling(
    num_rows: int, out_size: int, in_size: int, num_multiprocessors: int
) -> Fp8Tiling | None:
    """Return how `fp8_tiles_gemm` multiplies in less time than cuBLAS, or None if it cannot."""
    num_across = -(-out_size // _TILE_COLUMNS)
    if num_rows <= 64:
        num_turns = -(-num_across // num_multiprocessors)
        is_one_turn = num_turns == 1
        share = num_across / (num_turns * num_multiprocessors)
        if num_rows > 32 and not is_one_turn and share < _LEAST_BUSY:
            return None
        can_split = 2 * num_across <= num_multiprocessors and in_size % 512 == 0
        return Fp8Tiling(
            tile_rows=32 if num_rows <= 32 else 64,
            tile_depth=256,
            # In several turns, two programs per multiprocessor need the memory.
            num_stages=4 if is_one_turn else 3,
            num_parts=2 if can_split and in_size >= _MANY_INPUTS else 1,
        )
    if num_rows <= 128:
        for tile_rows in (64, 128):
            if -(-num_rows // tile_rows) * num_across <= num_multiprocessors:
                return Fp8Tiling(tile_rows=tile_rows, tile_depth=256, num_stages=4)
        return None
    is_busy = 2 * num_across >= _LEAST_BUSY * num_multiprocessors
    # Two programs per multiprocessor.
    if num_rows <= 192 and is_busy and 3 * num_across <= 2 * num_multiprocessors:
        return Fp8Tiling(tile_rows=64, tile_depth=128, num_stages=6)
    if num_rows <= 256 and is_busy and 2 * num_across <= num_multiprocessors:
        return Fp8Tiling(tile_rows=128, tile_depth=128, num_stages=6)
    return None


def new_arrivals(out_size: int, device: torch.device) -> torch.Tensor:
    """Return the counters that `fp8_tiles_gemm` needs for a weight of this many columns.

    A launch leaves them as it finds them, so all launches of one stream may share them.
    """
    return torch.zeros(-(-out_size // _TILE_COLUMNS), dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_rows"])
def _tile_gemm(
    rows: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    row_scales: tl.tensor,
    column_scales: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    num_rows: tl.tensor,
    size: tl.constexpr,
    in_size: tl.constexpr,
    num_parts: tl.constexpr,
    operand_type: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
) -> None:
    """Write one tile of the product, or one part of it.

    Launched by `fp8_tiles_gemm`; grid `(tiles of rows, tiles of columns, parts)`. Descriptors: rows
    `[num_rows, in_size]` and weight `[size, in_size]` in fp8. Pointers: out `[num_rows, size]`,
    row_scales `[num_rows]` and column_scales `[size]`, float32, parts `[num_parts, num_rows, size]`
    float32, arrivals `[tiles of columns]` int32. With several parts there is one tile of rows.
    """
    wait_for_inputs(is_dependent)
    row = tl.program_id(0) * tile_rows
    column = tl.program_id(1) * tile_columns
    part = tl.program_id(2)
    # The first operand of a tensor core has 64 rows: of the weight, if there are few inputs.
    has_few_rows: tl.constexpr = tile_rows < 64
    part_size: tl.constexpr = in_size // num_parts
    if has_few_rows:
        sums = tl.zeros([tile_columns, tile_rows], tl.float32)
    else:
        sums = tl.zeros([tile_rows, tile_columns], tl.float32)
    first = part * part_size
    for element in range(first, first + part_size, tile_depth):
        inputs = rows.load([row, element]).to(operand_type)
        weights = weight.load([column, element]).to(operand_type)
        left, right = (weights, inputs) if has_few_rows else (inputs, weights)
        sums = tl.dot(left, right.T, sums)
    if has_few_rows:
        sums = sums.T
    places = row + tl.arange(0, tile_rows)
    columns = column + tl.arange(0, tile_columns)
    row_scale = tl.load(row_scales + places, mask=places < num_rows, other=0.0)
    column_scale = tl.load(column_scales + columns, mask=columns < size, other=0.0)
    scaled = sums * row_scale[:, None] * column_scale[None, :]
    is_inside = (places < num_rows)[:, None] & (columns < size)[None, :]
    offsets = places.to(tl.int64)[:, None] * size + columns[None, :]
    if num_parts == 1:
        tl.store(out + offsets, scaled.to(out.dtype.element_ty), mask=is_inside)
    else:
        part_stride = num_rows.to(tl.int64) * size
        tl.store(parts + part * part_stride + offsets, scaled, mask=is_inside)
        # All threads must have stored their part before it is counted.
        tl.debug_barrier()
        arrival = arrivals + tl.program_id(1)
        if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
            tl.store(arrival, 0)
            # Added in a fixed order: results do not depend on which program is last.
            total = tl.zeros([tile_rows, tile_columns], tl.float32)
            for added in tl.static_range(num_parts):
                total += tl.load(parts + added * part_stride + offsets, mask=is_inside, other=0.0)
            tl.store(out + offsets, total.to(out.dtype.element_ty), mask=is_inside)


def fp8_tiles_gemm(
    rows: QuantizedRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    tiling: Fp8Tiling,
    arrivals: torch.Tensor,
) -> torch.Tensor:
    """Return `[num_rows, out_size]` of the dtype of the rows before quantization.

    `weight` is `[out_size, in_size]` in float8_e4m3fn and contiguous, with `scales` `[out_size, 1]`
    float32; `in_size` is a multiple of 16. `arrivals` comes from `new_arrivals`.
    """
    num_rows, in_size = rows.values.shape
    size = len(weight)
    assert rows.values.is_contiguous()
    assert rows.values.storage_offset() == 0
    assert rows.scales.is_contiguous()
    assert weight.is_contiguous()
    assert scales.shape == (size, 1)
    num_parts = tiling.num_parts
    assert num_parts == 1 or num_rows <= tiling.tile_rows
    assert num_parts == 1 or in_size % (num_parts * tiling.tile_depth) == 0
    out = torch.empty((num_rows, size), dtype=rows.dtype, device=weight.device)
    parts = out
    if num_parts > 1:
        parts = torch.empty((num_parts, num_rows, size), dtype=torch.float32, device=weight.device)
    tile = [tiling.tile_rows, tiling.tile_depth]
    grid = (-(-num_rows // tiling.tile_rows), -(-size // _TILE_COLUMNS), num_parts)
    # Whole tiles load faster; results of rows past the end are not stored.
    num_readable = rows.values.untyped_storage().nbytes() // in_size
    num_loaded = min(num_readable, grid[0] * tiling.tile_rows)
    _tile_gemm[grid](
        TensorDescriptor(rows.values, [num_loaded, in_size], [in_size, 1], tile),
        TensorDescriptor(weight, [size, in_size], [in_size, 1], [_TILE_COLUMNS, tiling.tile_depth]),
        out,
        rows.scales,
        scales,
        parts,
        arrivals,
        num_rows,
        size=size,
        in_size=in_size,
        num_parts=num_parts,
        # Triton's interpreter, which runs kernels on the CPU, cannot multiply fp8.
        operand_type=tl.float8e4nv if weight.is_cuda else tl.float32,
        tile_rows=tiling.tile_rows,
        tile_columns=_TILE_COLUMNS,
        tile_depth=tiling.tile_depth,
        num_warps=4,
        num_stages=tiling.num_stages,
        **dependent_launch(weight.device),
    )
    return out
