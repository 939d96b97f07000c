"""Writes rows of a checkpoint to the tensor that they are loaded into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.layers.formats.fp8_rows import quantized_rows
from workers.layers.formats.mxfp4 import SCALE

if TYPE_CHECKING:
    import torch

    from workers.layers.weight import WeightShard

__all__ = ["as_numbers", "quantize_to", "write_rows"]


def as_numbers(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that are stored for a target of a dtype: exponents are bytes."""
    return stored.view(SCALE) if dtype == SCALE else stored


def write_rows(shard: WeightShard, rows: slice, stored: torch.Tensor) -> None:
    """Write `stored` to these rows of the target, in its dtype, unless it is there already."""
    target = shard.target[rows]
    if shard.scales is not None:
        quantize_to(target, shard.scales[rows], stored)
    elif stored.data_ptr() != target.data_ptr():
        target.copy_(as_numbers(stored, target.dtype))


def quantize_to(target: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
    """Quantize rows, and write their values and their scales, `[num_rows, 1]`."""
    values, row_scales = quantized_rows(rows)
    target.copy_(values)
    scales.copy_(row_scales)
