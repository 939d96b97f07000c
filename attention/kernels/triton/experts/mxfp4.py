"""The layout of mxfp4 weights that the kernels of experts read."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["MXFP4_HALF", "mxfp4_row_bytes", "packed_mxfp4"]

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
