"""Linear layers sharded over the ranks by output columns or by input rows, as in Megatron-LM.

M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from workers.layers.formats.make_kernel import make_format_kernel
from workers.layers.weight import Layer, MatrixPart, Placement, WeightShard, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagedray.rank_roofline import WeightWork
    from workers.layers.linear_kernel import LinearKernel

__all__ = ["ColumnParallelLinear", "Columns", "RowParallelLinear", "columns_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The output columns of one layer of the checkpoint that this rank computes."""

    name: str
    """The layer's name in the checkpoint, without `.weight`."""
    total: int
    """Its number of output columns on all ranks together."""
    part: slice
    """This rank's columns."""
    scale: float = 1.0
    """Multiplies the columns: weight and bias, when they are loaded."""

    @property
    def size(self) -> int:
        """The number of columns on this rank."""
        return int(self.part.stop - self.part.start)


def columns_of(names: Sequence[str], layers: Sequence[tuple[int, slice]]) -> list[Columns]:
    """Return the columns of layers, given by their sizes and this rank's parts.

    One name for several layers stands for a fused tensor that holds them in this order.
    """
    if len(names) == len(layers):
        return [
            Columns(name=name, total=total, part=part)
            for name, (total, part) in zip(names, layers, strict=True)
        ]
    (name,) = names
    total = sum(size for size, _ in layers)
    columns, first = [], 0
    for size, part in layers:
        fused = slice(first + part.start, first + part.stop)
        columns.append(Columns(name=name, total=total, part=fused))
        first += size
    return columns


class ColumnParallelLinear(Layer):
    """One or several linear layers in one GEMM, of which each rank computes some columns."""

    def __init__(
        self,
        in_size: int,
        columns: Sequence[Columns],
        place: Placement,
        *,
        has_bias: bool,
        input_scale: float = 1.0,
    ) -> None:
        """`input_scale` multiplies the input: the weight, when it is loaded."""
        self._in_size = in_size
        self._input_scale = input_scale
        self._columns = tuple(columns)
        self.kernel = make_format_kernel(
            [part.name for part in columns],
            sum(part.size for part in columns),
            in_size,
            place,
            has_bias=has_bias,
        )

    @property
    def num_columns(self) -> int:
        """The number of output columns on this rank."""
        return sum(columns.size for columns in self._columns)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, columns of this rank]` for `[num_tokens, in_size]`."""
        return self.kernel(x)

    def weight_shards(self) -> Iterator[WeightShard]:
        first = 0
        for columns in self._columns:
            rows = slice(first, first + columns.size)
            source = MatrixPart(
                name=columns.name,
                shape=(columns.total, self._in_size),
                part=(columns.part, slice(None)),
            )
            yield from self.kernel.weight_shards(source, rows)
            if self.kernel.bias is not None:
                bias = self.kernel.bias[rows]
                name = f"{columns.name}.bias"
                yield WeightShard.of_vector(name, columns.total, columns.part, bias)
            first = rows.stop

    def finalize(self) -> None:
        scales = [columns.scale for columns in self._columns for _ in range(columns.size)]
        _scale(self.kernel, scales, self._input_scale)
        self.kernel.finalize()

    def weight_work(self) -> WeightWork:
        return self.kernel.work(self.num_columns, self._in_size)


class RowParallelLinear(Layer):
    """A linear layer of which each rank multiplies its part of the input; an all-reduce adds these.

    `kernel` computes the part of this rank alone.
    """

    def __init__(
        self,
        name: str,
        in_size: int,
        out_size: int,
        place: Placement,
        *,
        has_bias: bool,
        scale: float = 1.0,
    ) -> None:
        """`scale` multiplies the output: weight and bias, when they are loaded."""
        group = place.group
        self._scale = scale
        self._name = name
        self._shape = (out_size, in_size)
        self._part = part_of(in_size, group)
        self._group = group
        self._has_bias = has_bias
        self.kernel = make_format_kernel(
            [name], out_size, in_size // group.size, place, has_bias=has_bias and group.rank == 0
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, out_size]` for `[num_tokens, in_size / number of ranks]`."""
        return self._group.all_reduce(self.kernel(x))

    def weight_shards(self) -> Iterator[WeightShard]:
        source = MatrixPart(name=self._name, shape=self._shape, part=(slice(None), self._part))
        yield from self.kernel.weight_shards(source, slice(None))
        if self._has_bias:
            # The all-reduce must add the bias once, so that only rank 0 holds it.
            bias = self.kernel.bias
            part = slice(None if bias is not None else 0)
            target = bias if bias is not None else torch.empty(0)
            yield WeightShard.of_vector(f"{self._name}.bias", self._shape[0], part, target)

    def finalize(self) -> None:
        _scale(self.kernel, [self._scale] * self._shape[0], 1.0)
        self.kernel.finalize()

    def weight_work(self) -> WeightWork:
        out_size, in_size = self._shape
        return self.kernel.work(out_size, in_size // self._group.size)


def _scale(kernel: LinearKernel, column_scales: Sequence[float], input_scale: float) -> None:
    """Multiply what a kernel has loaded by the scales of its columns and of its input."""
    if input_scale == 1.0 and all(scale == 1.0 for scale in column_scales):
        return
    scales = torch.tensor(column_scales, device=kernel.weight.device)
    kernel.scale(scales * input_scale, scales)
