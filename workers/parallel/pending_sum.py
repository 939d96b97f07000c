"""A sum over the ranks that continues while the device computes something else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["FinishedSum", "PendingSum"]


class PendingSum(ABC):
    """A sum of rows that `ParallelGroup.begin_all_reduce` has begun, finished by one method."""

    @abstractmethod
    def finish(self) -> torch.Tensor:
        """Wait for the sum and return it, `[num_rows, width]`. Raises GroupBrokenError."""

    def add_norm(
        self,
        stream: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        *,
        is_centered: bool,
    ) -> torch.Tensor | None:
        """Add the sum to the stream, in place, and return the stream's norm.

        All are `[num_rows, width]`; the norm is that of `FusedNorm`. Returns None, and does
        nothing, if no kernel does both: then `finish` must be called.
        """
        return None


class FinishedSum(PendingSum):
    """A sum of one rank."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def finish(self) -> torch.Tensor:
        return self._rows
