"""Rows of a matrix product over parts of the inputs, before the parts are added."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["SplitRows"]


@dataclass(frozen=True, slots=True, eq=False)
class SplitRows:
    """Rows that are the sum of some parts."""

    parts: torch.Tensor
    """`[num_parts, num_rows, size]` float32, contiguous."""

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows, `[num_rows, size]`."""
        return self.parts.sum(0).to(dtype)
