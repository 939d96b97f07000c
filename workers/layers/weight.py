"""What links a parameter to a checkpoint: which part of which tensor goes where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from workers.parallel.group import ParallelGroup

__all__ = ["Composite", "Layer", "WeightSlot", "divided", "part_of"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WeightSlot:
    """One tensor of a checkpoint, and where this rank keeps its part of it."""

    name: str
    """Its name in the checkpoint."""
    shape: tuple[int, ...]
    """Its whole shape, as the checkpoint must have it."""
    part: tuple[slice, ...]
    """This rank's part, one slice a dimension."""
    target: torch.Tensor
    """A view into the parameter, as large as the part."""
    dummy: float | None = None
    """What fills it where weights are made up; None is random numbers."""


class Layer(Protocol):
    """What holds weights. Plain classes: a module's hooks cost more than a small layer does."""

    def slots(self) -> Iterator[WeightSlot]:
        """Yield every tensor that must be loaded."""

    def finalize(self) -> None:
        """Bring loaded weights into the form that is computed with, dropping the originals."""


class Composite(ABC):
    """A layer that is made of layers."""

    @abstractmethod
    def parts(self) -> Iterable[Layer]:
        """Return the layers."""

    def slots(self) -> Iterator[WeightSlot]:
        """Yield every tensor that must be loaded; not to be called after `finalize`."""
        for part in self.parts():
            yield from part.slots()

    def finalize(self) -> None:
        """Bring loaded weights into the form that is computed with, part by part."""
        for part in self.parts():
            part.finalize()


def divided(size: int, group_size: int) -> int:
    """Return the part of `size` that each rank has, rounded up."""
    return -(-size // group_size)


def part_of(size: int, group: ParallelGroup) -> slice:
    """Return this rank's part of what divides evenly."""
    local = size // group.size
    assert local * group.size == size
    return slice(group.rank * local, (group.rank + 1) * local)
