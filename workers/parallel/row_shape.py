"""The rows that a model's layers sum over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["RowShape"]


@dataclass(frozen=True, slots=True)
class RowShape:
    """The common properties of rows."""

    width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row."""
        return self.width * self.dtype.itemsize
