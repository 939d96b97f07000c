"""A row of the residual stream without its norm, which the next product computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["UnnormedRow"]


@dataclass(frozen=True, slots=True, eq=False)
class UnnormedRow:
    """One row, and the parameters of its RMSNorm."""

    stream: torch.Tensor
    """`[1, size]`."""
    weight: torch.Tensor
    """`[size]`, of the stream's dtype or float32."""
    eps: float

    def __len__(self) -> int:
        return len(self.stream)
