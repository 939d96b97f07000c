"""Linear layers sharded over the ranks by output columns or by input rows, as in Megatron-LM.

M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attention.kernels.quantized_rows import QuantizedRows
from attention.kernels.unnormed_row import UnnormedRow
from workers.layers.formats.make_kernel import make_format_kernel
from workers.layers.weight import Layer, MatrixPart, WeightShard, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attention.kernels.new_tokens import Rotary
    from attention.kernels.split_rows import SplitRows
    from pagedray.rank_roofline import WeightWork
    from pagedray.weight_format import Quantization
    from workers.layers.linear_kernels.linear_kernel import LinearKernel
    from workers.parallel.group import ParallelGroup

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
        *,
        has_bias: bool,
        quantization: Quantization | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._in_size = in_size
        self._columns = tuple(columns)
        self._kernel = make_format_kernel(
            [part.name for part in columns],
            quantization,
            sum(part.size for part in columns),
            in_size,
            has_bias=has_bias,
            dtype=dtype,
            device=device,
        )

    @property
    def num_columns(self) -> int:
        """The number of output columns on this rank."""
        return sum(columns.size for columns in self._columns)

    def takes_quantized(self, num_rows: int) -> bool:
        """Return whether a call with this number of rows takes them as `QuantizedRows`, too."""
        return self._kernel.takes_quantized(num_rows)

    def takes_unnormed(self, num_rows: int) -> bool:
        """Return whether a call with this number of rows takes an `UnnormedRow`, too."""
        return self._kernel.takes_unnormed(num_rows)

    def __call__(self, x: torch.Tensor | QuantizedRows | UnnormedRow) -> torch.Tensor:
        """Return `[num_tokens, columns of this rank]` for `[num_tokens, in_size]`."""
        if isinstance(x, UnnormedRow):
            return self._kernel.of_unnormed(x)
        return self._kernel.of_quantized(x) if isinstance(x, QuantizedRows) else self._kernel(x)

    def write(self, x: torch.Tensor | QuantizedRows, out: torch.Tensor) -> None:
        """Write what a call returns to `out`, `[num_tokens, num_columns]`."""
        if isinstance(x, QuantizedRows):
            out.copy_(self._kernel.of_quantized(x))
        else:
            self._kernel.write(x, out)

    def kernel_of(self, columns: slice) -> LinearKernel | None:
        """Return a kernel of some columns of this rank, if the layout of the weight permits.

        Must be called after `finalize`.
        """
        return self._kernel.part(columns)

    def rotates(self, num_rows: int, head_size: int, num_rotated: int) -> bool:
        """Return whether `write_rotated` takes less time than `write` and a rotation."""
        return self._kernel.rotates(num_rows, head_size, num_rotated)

    def write_rotated(
        self, x: torch.Tensor, rotary: Rotary, num_rotated: int, out: torch.Tensor
    ) -> None:
        """Write what a call returns to `out`, with the heads in the first columns rotated.

        Only if `rotates`. `out` is `[num_tokens, num_columns]`; the first `num_rotated` of these
        are heads, which are rotated to the positions of the tokens.
        """
        self._kernel.write_rotated(x, rotary, num_rotated, out)

    def gated(self, x: torch.Tensor | UnnormedRow) -> torch.Tensor:
        """Return `silu(first half) * second half` of this rank's columns.

        The shape is `[num_tokens, columns of this rank / 2]`.
        """
        if isinstance(x, UnnormedRow):
            return self._kernel.gated_of_unnormed(x)
        return self._kernel.gated(x)

    def weight_shards(self) -> Iterator[WeightShard]:
        first = 0
        for columns in self._columns:
            rows = slice(first, first + columns.size)
            source = MatrixPart(
                name=columns.name,
                shape=(columns.total, self._in_size),
                part=(columns.part, slice(None)),
            )
            yield from self._kernel.weight_shards(source, rows)
            if self._kernel.bias is not None:
                yield WeightShard(
                    name=f"{columns.name}.bias",
                    shape=(columns.total,),
                    part=(columns.part,),
                    target=self._kernel.bias[rows],
                )
            first = rows.stop

    def reorder(self, order: torch.Tensor) -> None:
        """Reorder the loaded columns of this rank; must be called before `finalize`."""
        self._kernel.reorder(order)

    def finalize(self) -> None:
        self._kernel.finalize()

    def weight_work(self) -> WeightWork:
        return self._kernel.work(self.num_columns, self._in_size)


class RowParallelLinear(Layer):
    """A linear layer of which each rank multiplies its part of the input; an all-reduce adds these.

    Without `reduces`, the outputs stay partial for a `ResidualNorm` that sums them as well.
    """

    def __init__(
        self,
        name: str,
        in_size: int,
        out_size: int,
        *,
        has_bias: bool,
        reduces: bool,
        group: ParallelGroup,
        quantization: Quantization | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._name = name
        self._shape = (out_size, in_size)
        self._reduces = reduces
        self._part = part_of(in_size, group)
        self._group = group
        self._has_bias = has_bias
        self._kernel = make_format_kernel(
            [name],
            quantization,
            out_size,
            in_size // group.size,
            has_bias=has_bias and group.rank == 0,
            dtype=dtype,
            device=device,
        )

    def takes_quantized(self, num_rows: int) -> bool:
        """Return whether a call with this number of rows takes them as `QuantizedRows`, too."""
        return self._kernel.takes_quantized(num_rows)

    def __call__(self, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        """Return `[num_tokens, out_size]` for `[num_tokens, in_size / number of ranks]`.

        It is equal on all ranks, or this rank's partial output.
        """
        partial = self._kernel.of_quantized(x) if isinstance(x, QuantizedRows) else self._kernel(x)
        return self._group.all_reduce(partial) if self._reduces else partial

    def add_or_return(
        self, stream: torch.Tensor, x: torch.Tensor | QuantizedRows
    ) -> torch.Tensor | SplitRows | None:
        """Add the output to the stream, in place, if one kernel does both; else return it.

        A rank that has a part of the output returns it, as a call does.
        """
        if self._group.size > 1 or isinstance(x, QuantizedRows):
            return self(x)
        return self._kernel.add_or_return(stream, x)

    def weight_shards(self) -> Iterator[WeightShard]:
        source = MatrixPart(name=self._name, shape=self._shape, part=(slice(None), self._part))
        yield from self._kernel.weight_shards(source, slice(None))
        if self._has_bias:
            # The all-reduce must add the bias once, so that only rank 0 holds it.
            bias = self._kernel.bias
            yield WeightShard(
                name=f"{self._name}.bias",
                shape=self._shape[:1],
                part=(slice(None) if bias is not None else slice(0),),
                target=bias if bias is not None else torch.empty(0),
            )

    def finalize(self) -> None:
        self._kernel.finalize()

    def weight_work(self) -> WeightWork:
        out_size, in_size = self._shape
        return self._kernel.work(out_size, in_size // self._group.size)
