"""A tensor-parallel group and its collectives.

A group is an object, never a global: nothing here touches torch.distributed's default group, so one
process can hold several groups, and a rebuilt group starts clean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from pagedray.rank_progress import ProgressWord
from workers.parallel.pending_sum import FinishedSum, PendingSum

if TYPE_CHECKING:
    import torch

    from workers.parallel.all_reduce import OneShotAllReduce
    from workers.parallel.rendezvous import GroupAddress, Rendezvous

__all__ = ["GroupBrokenError", "ParallelGroup", "SoloGroup"]


class GroupBrokenError(Exception):
    """A collective failed because another rank has left the group; this rank may join again."""


class ParallelGroup(ABC):
    """The ranks that hold one copy of the model, from the view of one of them.

    Every rank calls the same collectives in the same order. After `leave`, a rank may join again:
    layers keep this object for as long as they have their weights, while other ranks come and go.
    """

    def __init__(self, rank: int, size: int, progress: ProgressWord | None = None) -> None:
        assert 0 <= rank < size
        self.rank = rank
        self.size = size
        self.progress = progress if progress is not None else ProgressWord()
        """Where this rank records its progress."""
        self.num_neighbors = 1
        """Ranks that share the memory of a node, this one included; 1 if there are several nodes,
        as it is unknown then."""
        self.one_shot: OneShotAllReduce | None = None
        """Sums a few rows faster than `all_reduce`, if the ranks can write to each other."""
        self.overlaps_sums = False
        """Whether `begin_all_reduce` saves time: the device computes while ranks exchange data."""
        self.max_begun_rows = 0
        """The most rows of a sum that layers begin; set it before `join`, which allocates memory
        for them. Sums of more rows take longer."""

    def __enter__(self) -> ParallelGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def join(
        self, address: GroupAddress, *, host: str, rendezvous: Rendezvous | None = None
    ) -> None:
        """Connect to the other ranks through the rendezvous at `address`. Raises DeviceError.

        `rendezvous` is the file or socket that this rank has opened at that address; other ranks
        reach this rank at `host`.
        """

    @abstractmethod
    def abort(self) -> None:
        """End the collectives that wait for ranks that are gone.

        May be called on any thread; may return only after graphs that captured collectives are
        dropped. Nothing but `leave` or `close` follows.
        """

    @abstractmethod
    def leave(self) -> None:
        """Disconnect from ranks of which some are gone. Drop captured graphs before."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks, in place, and return it. Raises GroupBrokenError."""

    @abstractmethod
    def begin_all_reduce(self, rows: torch.Tensor) -> PendingSum:
        """Begin to sum `[num_rows, width]` over the ranks. Raises GroupBrokenError.

        `rows` may change until the sum is finished. At most two sums may be pending; finish all of
        them before any other collective.
        """

    @abstractmethod
    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the `[n, local]` tensors of all ranks side by side, `[n, local * size]`.

        Raises GroupBrokenError.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called this. Raises GroupBrokenError."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Drop CUDA graphs that captured its collectives before."""


class SoloGroup(ParallelGroup):
    """A group of one rank; its collectives do nothing."""

    def __init__(self, progress: ProgressWord | None = None) -> None:
        super().__init__(rank=0, size=1, progress=progress)

    def join(
        self, address: GroupAddress, *, host: str, rendezvous: Rendezvous | None = None
    ) -> None:
        if rendezvous is not None:
            rendezvous.close()

    def abort(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def begin_all_reduce(self, rows: torch.Tensor) -> PendingSum:
        return FinishedSum(rows)

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass
