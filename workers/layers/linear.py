"""Linear layers that are spread over the ranks of a group, by columns or by rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from workers.layers.linear_kernels import make_product
from workers.layers.weight import WeightSlot, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workers.parallel.group import ParallelGroup

__all__ = ["ColumnParallelLinear", "Columns", "RowParallelLinear", "columns_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Output columns that one layer of the checkpoint contributes on this rank."""

    name: str
    """The layer's name in the checkpoint, without `.weight`."""
    total: int
    """Its output columns on all ranks together."""
    part: slice
    """Those that are meant, all of them this rank's."""

    @property
    def size(self) -> int:
        """Return the number of columns on this rank."""
        return int(self.part.stop - self.part.start)


def columns_of(names: Sequence[str], layers: Sequence[tuple[int, slice]]) -> list[Columns]:
    """Return the columns of layers, given as their sizes and this rank's parts.

    One name for several layers says that the checkpoint holds them as one, in this order.
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


class ColumnParallelLinear:
    """Each rank computes some output columns of one or several layers, in one product."""

    def __init__(
        self,
        in_size: int,
        columns: Sequence[Columns],
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._in_size = in_size
        self._columns = tuple(columns)
        self._product = make_product(
            sum(part.size for part in columns),
            in_size,
            has_bias=has_bias,
            dtype=dtype,
            device=device,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns, `[num_tokens, columns]`."""
        return self._product(x)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Return `silu(first half of the columns) * second half` of this rank's columns."""
        return self._product.gated(x)

    def slots(self) -> Iterator[WeightSlot]:
        """Yield the parts of weight and bias of every layer that was merged."""
        first = 0
        for columns in self._columns:
            rows = slice(first, first + columns.size)
            yield WeightSlot(
                name=f"{columns.name}.weight",
                shape=(columns.total, self._in_size),
                part=(columns.part, slice(None)),
                target=self._product.weight[rows],
            )
            if self._product.bias is not None:
                yield WeightSlot(
                    name=f"{columns.name}.bias",
                    shape=(columns.total,),
                    part=(columns.part,),
                    target=self._product.bias[rows],
                )
            first = rows.stop

    def finalize(self) -> None:
        """Bring the weight into the form that is multiplied with."""
        self._product.finalize()


class RowParallelLinear:
    """Each rank multiplies its part of the input; the sum over the ranks is the output."""

    def __init__(
        self,
        name: str,
        in_size: int,
        out_size: int,
        *,
        has_bias: bool,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._name = name
        self._shape = (out_size, in_size)
        self._part = part_of(in_size, group)
        self._group = group
        self._has_bias = has_bias
        self._product = make_product(
            out_size,
            in_size // group.size,
            has_bias=has_bias and group.rank == 0,
            dtype=dtype,
            device=device,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole output, `[num_tokens, out_size]`, the same on every rank."""
        return self._group.all_reduce(self._product(x))

    def slots(self) -> Iterator[WeightSlot]:
        """Yield weight and bias."""
        yield WeightSlot(
            name=f"{self._name}.weight",
            shape=self._shape,
            part=(slice(None), self._part),
            target=self._product.weight,
        )
        if self._has_bias:
            # The sum over the ranks must hold the bias once: other ranks take no part of it.
            bias = self._product.bias
            yield WeightSlot(
                name=f"{self._name}.bias",
                shape=self._shape[:1],
                part=(slice(None) if bias is not None else slice(0),),
                target=bias if bias is not None else torch.empty(0),
            )

    def finalize(self) -> None:
        """Bring the weight into the form that is multiplied with."""
        self._product.finalize()
