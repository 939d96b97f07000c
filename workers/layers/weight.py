"""What links a parameter to a checkpoint: which part of which tensor goes where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Layer", "WeightSlot", "divided"]


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


class Layer(Protocol):
    """What holds weights. Plain classes: a module's hooks cost more than a small layer does."""

    def slots(self) -> Iterator[WeightSlot]:
        """Yield every tensor that must be loaded."""

    def finalize(self) -> None:
        """Bring loaded weights into the form that is computed with, dropping the originals."""


def divided(size: int, group_size: int) -> int:
    """Return the part of `size` that each rank has, rounded up."""
    return -(-size // group_size)
