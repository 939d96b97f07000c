"""The link between a parameter and a checkpoint, and the interface of layers with weights.

Loading has three steps, which `Layer` names: `weight_shards` returns the target of each part of
each tensor, the loader fills these targets, and `finalize` converts the loaded tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attention.abstract import AttentionBackend
from pagedray.rank_roofline import WeightWork
from pagedray.weight_format import Quantization
from workers.parallel.group import ParallelGroup

if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = [
    "CompositeLayer",
    "Layer",
    "MatrixPart",
    "Placement",
    "WeightShard",
    "divided",
    "part_of",
    "steps_of",
]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where a rank computes the layers of a model, and how."""

    group: ParallelGroup
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization | None = None
    """The formats of weights; None is `dtype` for all weights."""
    backend: type[AttentionBackend] | None = None
    """Required by layers with attention."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WeightShard:
    """This rank's part of one tensor of a checkpoint, and where it is loaded to."""

    name: str
    """The tensor's name in the checkpoint."""
    shape: tuple[int, ...]
    """The whole tensor's shape in the checkpoint."""
    part: tuple[slice, ...]
    """This rank's part, one slice per dimension."""
    target: torch.Tensor
    """A view into the parameter, of the part's shape."""
    dummy: float | None = None
    """The value of dummy weights; None stands for random numbers."""
    scales: torch.Tensor | None = None
    """`[rows of the part, 1]` float32, for rows that are quantized when they are loaded: `target`
    is then in float8_e4m3fn, and stands for its values times these."""

    @classmethod
    def whole(cls, name: str, target: torch.Tensor, *, dummy: float | None = None) -> WeightShard:
        """Return the shard that loads a whole tensor."""
        part = (slice(None),) * target.ndim
        return cls(name=name, shape=tuple(target.shape), part=part, target=target, dummy=dummy)

    @classmethod
    def of_vector(
        cls, name: str, size: int, part: slice, target: torch.Tensor, *, dummy: float | None = None
    ) -> WeightShard:
        """Return the shard that loads a part of a vector of this size."""
        return cls(name=name, shape=(size,), part=(part,), target=target, dummy=dummy)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixPart:
    """This rank's part of the weight of one linear layer of a checkpoint."""

    name: str
    """The layer's name in the checkpoint, without `.weight`."""
    shape: tuple[int, int]
    """The whole weight's, `[out_size, in_size]`, however it is stored."""
    part: tuple[slice, slice]
    """This rank's outputs and inputs."""

    def shard(self, target: torch.Tensor, *, scales: torch.Tensor | None = None) -> WeightShard:
        """Return the shard that loads the part as it is stored."""
        return WeightShard(
            name=f"{self.name}.weight",
            shape=self.shape,
            part=self.part,
            target=target,
            scales=scales,
        )


class Layer(ABC):
    """Holds weights. Not a `torch.nn.Module`: its hooks cost more than a small layer does."""

    @abstractmethod
    def weight_shards(self) -> Iterator[WeightShard]:
        """Yield every tensor to load; must not be called after `finalize`."""

    def finalize(self) -> None:  # noqa: B027  # Most layers use weights as they are loaded.
        """Convert loaded weights into the layout of the kernels, and drop the originals."""

    def weight_work(self) -> WeightWork:
        """Return the cost of the weights in a step; must be called after `finalize`.

        A table, of which a step reads single rows, costs nothing.
        """
        return WeightWork()


class CompositeLayer(Layer):
    """A layer made of the layers among its attributes, and in its lists."""

    def sublayers(self) -> Iterator[Layer]:
        """Yield the layers, in the order in which their attributes were set."""
        for value in vars(self).values():
            layers = value if isinstance(value, list) else [value]
            yield from (layer for layer in layers if isinstance(layer, Layer))

    def weight_shards(self) -> Iterator[WeightShard]:
        for layer in self.sublayers():
            yield from layer.weight_shards()

    def finalize(self) -> None:
        for layer in self.sublayers():
            layer.finalize()

    def weight_work(self) -> WeightWork:
        return sum((layer.weight_work() for layer in self.sublayers()), WeightWork())


def divided(size: int, group_size: int) -> int:
    """Return each rank's share of `size`, rounded up."""
    return -(-size // group_size)


def part_of(size: int, group: ParallelGroup) -> slice:
    """Return this rank's share of `size`, which must be a multiple of the group's size."""
    local = size // group.size
    assert local * group.size == size
    return slice(group.rank * local, (group.rank + 1) * local)


def steps_of(size: int, step: int, group: ParallelGroup) -> slice:
    """Return this rank's share of `size` in multiples of `step`, about equal on all ranks."""
    num_steps = -(-size // step)
    first, end = (num_steps * rank // group.size for rank in (group.rank, group.rank + 1))
    return slice(first * step, min(size, end * step))
