"""The interface of a weight as a checkpoint stores it, in a format that products do not read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from workers.layers.weight import MatrixPart, WeightShard

__all__ = ["StoredWeight"]


class StoredWeight(ABC):
    """A weight, `[out_size, in_size]`, in the tensors of its format."""

    @abstractmethod
    def weight_shards(self, source: MatrixPart, rows: slice) -> Iterator[WeightShard]:
        """Yield the checkpoint tensors that fill these rows of the weight."""

    @abstractmethod
    def reorder(self, order: torch.Tensor) -> None:
        """Reorder the loaded rows; must be called before `finalize`."""

    def finalize(self) -> None:  # noqa: B027  # Most tensors stay as they are.
        """Convert the loaded tensors into the form that products read."""

    @abstractmethod
    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, `[out_size, in_size]`; must be called after `finalize`."""
