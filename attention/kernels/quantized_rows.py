"""Rows of inputs that are quantized for a product."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["QuantizedRows"]


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows in float8_e4m3fn, each with a scale to multiply it by."""

    values: torch.Tensor
    """`[num_rows, size]` float8_e4m3fn."""
    scales: torch.Tensor
    """`[num_rows, 1]` float32."""
    dtype: torch.dtype
    """The dtype of the rows before quantization, and of products with them."""

    def __len__(self) -> int:
        return len(self.values)
