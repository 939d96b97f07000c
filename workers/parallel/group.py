"""The ranks of a group as one thing: the collectives of tensor parallelism.

A group is an object, never a global: nothing here touches torch.distributed's default group, so
that two groups may live in one process and a rebuilt one finds nothing of the one before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    import torch

__all__ = ["ParallelGroup", "SoloGroup"]


class ParallelGroup(ABC):
    """The ranks that hold one copy of the model, from the view of one of them.

    Every rank calls the same collectives in the same order.
    """

    def __init__(self, rank: int, size: int) -> None:
        assert 0 <= rank < size
        self.rank = rank
        self.size = size

    def __enter__(self) -> ParallelGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks, in place, and return it."""

    @abstractmethod
    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the `[n, local]` tensors of all ranks side by side, `[n, local * size]`."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called this."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Drop CUDA graphs that captured its collectives before."""


class SoloGroup(ParallelGroup):
    """A group of one rank, whose collectives do nothing."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass
