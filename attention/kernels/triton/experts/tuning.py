"""Tile sizes of the products of rows with their experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from attention.kernels.triton.tuning import next_power_of_two

__all__ = ["MXFP4_HALF", "ExpertTuning", "default_expert_tuning", "mxfp4_row_bytes", "packed_mxfp4"]

MXFP4_HALF = 32
"""Distance between the inputs of the two numbers in a byte: one block, which shares a scale."""


def mxfp4_row_bytes(in_size: int) -> int:
    """Return the bytes of a column's weights in mxfp4."""
    return -(-in_size // (2 * MXFP4_HALF)) * MXFP4_HALF


def packed_mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Return weights as the kernels read them, uint8 `[out_size, mxfp4_row_bytes(in_size)]`.

    `blocks` is uint8 `[out_size, in_size / 32, 16]`, with the first of two adjacent numbers in the
    lower 4 bits of a byte. In the result, a byte has a number of one block and the number at the
    same place in the next block.
    """
    numbers = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    if numbers.shape[1] % 2:
        numbers = functional.pad(numbers, (0, 0, 0, 1))
    low, high = numbers.view(len(numbers), -1, 2, MXFP4_HALF).unbind(2)
    return (low | high << 4).flatten(1)


_MIN_ROWS = 16
"""The smallest matrix product of tensor cores."""
_TILES = {16: (128, 128, 4, 3), 32: (128, 128, 4, 3), 64: (64, 64, 4, 3), 128: (128, 64, 8, 4)}
"""Columns, depth, warps and stages by the pairs of a tile."""
_MXFP4_TILE = (64, 2 * MXFP4_HALF, 4, 3)
"""The same with weights in mxfp4, for any number of pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTuning:
    """How the products are tiled. Results differ by rounding only."""

    tile_pairs: int
    """Pairs of a program, a power of two from 16."""
    tile_columns: int
    tile_depth: int
    """Elements of the inner dimension per iteration."""
    num_warps: int
    num_stages: int


def default_expert_tuning(
    *, num_pairs: int, num_experts: int, dtype: torch.dtype, is_mxfp4: bool = False
) -> ExpertTuning:
    """Return the tuning for the mean number of pairs per expert.

    Microseconds of a layer of Qwen3-30B-A3B (128 experts of 768, 8 chosen) in bfloat16 on an H200,
    and the time to read the weights of the chosen experts at memory bandwidth: 16 rows 190 and 187,
    256 rows 304 and 288, 512 rows 317 and 288, 8192 rows 1528 and 288 (405 TFLOP/s).
    """
    if dtype == torch.float32 and not is_mxfp4:
        return ExpertTuning(
            tile_pairs=_tile_pairs(num_pairs, num_experts, most=64),
            tile_columns=64,
            tile_depth=32,
            num_warps=4,
            num_stages=2,
        )
    tile_pairs = _tile_pairs(num_pairs, num_experts, most=128)
    columns, depth, num_warps, num_stages = _MXFP4_TILE if is_mxfp4 else _TILES[tile_pairs]
    return ExpertTuning(
        tile_pairs=tile_pairs,
        tile_columns=columns,
        tile_depth=depth,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _tile_pairs(num_pairs: int, num_experts: int, *, most: int) -> int:
    """Return twice the mean number of pairs of an expert, so that most experts need one tile."""
    wanted = next_power_of_two(-(-2 * num_pairs // num_experts))
    return max(_MIN_ROWS, min(wanted, most))
