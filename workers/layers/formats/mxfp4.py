"""Weights in mxfp4: blocks of 32 inputs in 4 bits each, which share a power of two as scale.

Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedray.weight_format import MXFP4_BLOCK_SIZE

__all__ = ["BLOCK_BYTES", "SCALE", "Mxfp4Matrix", "dequantized_mxfp4"]

BLOCK_BYTES = MXFP4_BLOCK_SIZE // 2
SCALE = torch.float8_e8m0fnu
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Matrix:
    """A matrix of `[out_size, in_size]`."""

    blocks: torch.Tensor
    """`[out_size, in_size / 32, 16]` uint8; of a byte, the lower 4 bits are the first number."""
    scales: torch.Tensor
    """`[out_size, in_size / 32]` float8_e8m0fnu."""

    @classmethod
    def empty(cls, *shape: int, device: torch.device) -> Mxfp4Matrix:
        """Return matrices of a shape that ends with `out_size` and `in_size`, uninitialized."""
        *rows, in_size = shape
        assert in_size % MXFP4_BLOCK_SIZE == 0
        num_blocks = in_size // MXFP4_BLOCK_SIZE
        return cls(
            torch.empty(*rows, num_blocks, BLOCK_BYTES, dtype=torch.uint8, device=device),
            torch.empty(*rows, num_blocks, dtype=SCALE, device=device),
        )

    def __getitem__(self, rows: int | slice) -> Mxfp4Matrix:
        """Return some rows, or one matrix of a stack."""
        return Mxfp4Matrix(self.blocks[rows], self.scales[rows])


def dequantized_mxfp4(matrix: Mxfp4Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the dequantized matrix, `[out_size, in_size]`."""
    bits = torch.stack((matrix.blocks & 15, matrix.blocks >> 4), dim=-1).flatten(-2).int()
    numbers = torch.tensor(
        [*_MAGNITUDES, *(-number for number in _MAGNITUDES)], device=matrix.blocks.device
    )
    # float32 has the same exponent bias. Torch converts this dtype on few devices only.
    exponents = matrix.scales.view(torch.uint8).int()
    powers = torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)
    return (numbers[bits] * powers.unsqueeze(-1)).flatten(-2).to(dtype)
