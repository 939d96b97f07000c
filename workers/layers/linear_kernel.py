"""What all kernels of linear layers do, and the one for weights as they are loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch.nn import functional

from pagedray.rank_roofline import WeightWork
from workers.layers.activation import gated_columns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attention.kernels.arguments import (
        DeferredRMSNorm,
        QuantizedRows,
        Rotary,
        RowConv,
        SplitKPartials,
    )
    from pagedray.model_config import Activation
    from workers.layers.weight import MatrixPart, WeightShard

__all__ = ["DenseLinear", "LinearKernel"]


class LinearKernel(ABC):
    """A weight, its bias if any, and the GEMM that multiplies by them."""

    owns_weight = False
    """Whether nothing else reads the weight, which `finalize` may then overwrite."""
    multiplies_fp8: ClassVar[bool] = False
    """Whether the product with many rows is one of fp8 numbers."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        """`[out_size, in_size]`, loaded before `finalize`, which may repack or drop it."""
        self.bias = bias
        self._weight_bytes = weight.nbytes

    @classmethod
    def empty(
        cls,
        out_size: int,
        in_size: int,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Return a kernel of these sizes with an uninitialized weight."""
        weight = torch.empty(out_size, in_size, dtype=dtype, device=device)
        bias = torch.empty(out_size, dtype=dtype, device=device) if has_bias else None
        kernel = cls(weight, bias)
        kernel.owns_weight = True
        return kernel

    def weight_shards(self, source: MatrixPart, rows: slice) -> Iterator[WeightShard]:
        """Yield the checkpoint tensors that fill these rows of the weight."""
        yield source.shard(self.weight[rows])

    def reorder(self, order: torch.Tensor) -> None:
        """Reorder the loaded output columns; must be called before `finalize`."""
        self.weight.copy_(self.weight[order])
        if self.bias is not None:
            self.bias.copy_(self.bias[order])

    def scale(self, factors: torch.Tensor, bias_factors: torch.Tensor) -> None:
        """Multiply the loaded weight and bias by output column; call it before `finalize`.

        Both are `[out_size]` float32.
        """
        self.weight.mul_(factors.unsqueeze(1))
        if self.bias is not None:
            self.bias.mul_(bias_factors)

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weight that a product reads; must be read after `finalize`."""
        return self._weight_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of the weight and the bias; must be read after `finalize`."""
        return self.weight_bytes + (0 if self.bias is None else self.bias.nbytes)

    def work(self, out_size: int, in_size: int) -> WeightWork:
        """Return what a weight of these sizes costs a step; must be called after `finalize`."""
        flop = 2.0 * out_size * in_size
        return WeightWork(
            num_bytes=self.num_bytes,
            row_flop=0.0 if self.multiplies_fp8 else flop,
            fp8_row_flop=flop if self.multiplies_fp8 else 0.0,
        )

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, out_size]` for `[num_rows, in_size]`."""

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write what a call returns to `out`."""
        out.copy_(self(x))

    def part(self, columns: slice) -> LinearKernel | None:
        """Return a kernel of some output columns, with the same weight, if its layout permits."""
        return None

    def rotates(self, num_rows: int, head_size: int, num_rotated: int) -> bool:
        """Return whether `write_rotated` takes less time than `write` and a rotation."""
        return False

    def write_rotated(
        self, x: torch.Tensor, rotary: Rotary, num_rotated: int, out: torch.Tensor
    ) -> None:
        """Write the product with rotated heads in the first `num_rotated` columns; if `rotates`."""
        raise NotImplementedError

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return `activation(first half of the product) * second half`.

        `[num_rows, out_size / 2]`.
        """
        return gated_columns(self(x), activation)

    def accepts_quantized(self, num_rows: int) -> bool:
        """Return whether `forward_quantized` computes what a call would for this number of rows."""
        return False

    def forward_quantized(self, rows: QuantizedRows) -> torch.Tensor:
        """Return `[num_rows, out_size]`; only if `accepts_quantized`."""
        raise NotImplementedError

    def accepts_deferred_norm(self, num_rows: int) -> bool:
        """Return whether `forward_with_norm` computes a norm and a call, for this many rows."""
        return False

    def forward_with_norm(
        self, row: DeferredRMSNorm, normed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `[1, out_size]`; only if `accepts_deferred_norm`. Write the norm to `normed`."""
        raise NotImplementedError

    def convolved_with_norm(self, row: DeferredRMSNorm, conv: RowConv) -> torch.Tensor:
        """Return what `forward_with_norm` does, with a convolution of some columns."""
        raise NotImplementedError

    def gated_with_norm(self, row: DeferredRMSNorm, activation: Activation) -> torch.Tensor:
        """Return what `gated` does, `[1, out_size / 2]`; only if `accepts_deferred_norm`."""
        raise NotImplementedError

    def forward_residual(
        self, stream: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor | SplitKPartials | None:
        """Add the product to the stream, in place, if one kernel does both; else return it.

        `SplitKPartials` if that takes less time, and what follows adds the parts.
        """
        return self(x)

    def finalize(self) -> None:  # noqa: B027  # A dense weight stays as it is.
        """Convert the loaded weight into the layout of the kernel."""


class DenseLinear(LinearKernel):
    """The weight as loaded: for GPUs, and for CPUs without a better layout."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)

    def part(self, columns: slice) -> LinearKernel:
        bias = None if self.bias is None else self.bias[columns]
        return type(self)(self.weight[columns], bias)

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)

    def forward_residual(
        self, stream: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor | SplitKPartials | None:
        if self.bias is not None:
            return self(x)
        # The norm that follows then reads and writes two matrices instead of four.
        stream.addmm_(x, self.weight.t())
        return None
