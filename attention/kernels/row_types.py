"""Rows that kernels pass to each other in place of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["DeferredRMSNorm", "QuantizedRows", "SplitKPartials"]


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Inputs of a product in float8_e4m3fn, each row with a scale to multiply the row by."""

    values: torch.Tensor
    """`[num_rows, size]` float8_e4m3fn."""
    scales: torch.Tensor
    """`[num_rows, 1]` float32."""
    dtype: torch.dtype
    """The dtype of the rows before quantization, and of products with the rows."""

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class DeferredRMSNorm:
    """A row of the residual stream; the product that reads the row computes its RMSNorm."""

    stream: torch.Tensor
    """`[1, size]`."""
    weight: torch.Tensor
    """`[size]`, of the stream's dtype or float32."""
    eps: float

    def __len__(self) -> int:
        return len(self.stream)


@dataclass(frozen=True, slots=True, eq=False)
class SplitKPartials:
    """The parts of a product with divided inputs; the rows are the sum of the parts."""

    parts: torch.Tensor
    """`[num_parts, num_rows, size]` float32, contiguous."""

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows, `[num_rows, size]`."""
        return self.parts.sum(0).to(dtype)
