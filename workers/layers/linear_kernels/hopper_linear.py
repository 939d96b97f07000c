"""Linear layers on Hopper GPUs, for which some kernels are our own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attention.kernels.multiprocessors import num_multiprocessors
from workers.layers.linear_kernels.linear_kernel import DenseLinear
from workers.layers.linear_kernels.split_product import is_faster_split, split_product

if TYPE_CHECKING:
    import torch

    from attention.kernels.new_tokens import Rotary
    from attention.kernels.split_rows import SplitRows
    from attention.kernels.unnormed_row import UnnormedRow

__all__ = ["HopperLinear"]


class HopperLinear(DenseLinear):
    """A dense weight, and kernels of our own for Hopper GPUs.

    They multiply one row, a few rows, and many rows if the gate of an MLP or a rotation follows.
    Products that are added to the residual stream may be in parts.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        # Triton is absent on machines without a GPU.
        from attention.kernels.triton.gemm.gemv import default_gemv_tuning
        from attention.kernels.triton.gemm.skinny import default_skinny_tuning
        from attention.kernels.triton.gemm.trials import failed_trials

        self._tuning = default_skinny_tuning(*weight.shape, is_gated=False)
        self._gated_tuning = default_skinny_tuning(*weight.shape, is_gated=True)
        self._gemv_tuning = default_gemv_tuning(weight, is_gated=False)
        self._gated_gemv_tuning = default_gemv_tuning(weight, is_gated=True)
        self._num_multiprocessors = num_multiprocessors(weight.device)
        failed = failed_trials(weight.device)
        if "skinny" in failed:
            self._tuning = self._gated_tuning = None
        if "gemv" in failed:
            self._gemv_tuning = self._gated_gemv_tuning = None
        self._has_normed_gemv = "normed_gemv" not in failed
        self._has_gated = "persistent_gated" not in failed
        self._has_rotated = "persistent_rotated" not in failed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        from attention.kernels.triton.gemm.gemv import gemv
        from attention.kernels.triton.gemm.skinny import MAX_ROWS, skinny_gemm

        if len(x) == 1 and self._gemv_tuning is not None:
            return gemv(x, self.weight, self.bias, self._gemv_tuning)
        if self._tuning is None or len(x) > MAX_ROWS:
            return super().__call__(x)
        return skinny_gemm(x, self.weight, self.bias, self._tuning)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        from attention.kernels.triton.gemm.gemv import gemv_gated
        from attention.kernels.triton.gemm.persistent_gated import keeps_gpu_busy, persistent_gated
        from attention.kernels.triton.gemm.skinny import MAX_ROWS, skinny_gated

        if self.bias is not None:
            return super().gated(x)
        if len(x) > MAX_ROWS:
            num_programs = self._num_multiprocessors
            if self._has_gated and keeps_gpu_busy(len(x), self.weight, num_programs):
                return persistent_gated(x, self.weight, "silu", num_programs)
            return super().gated(x)
        if len(x) == 1 and self._gated_gemv_tuning is not None:
            return gemv_gated(x, self.weight, "silu", self._gated_gemv_tuning)
        if self._gated_tuning is None:
            return super().gated(x)
        return skinny_gated(x, self.weight, "silu", self._gated_tuning)

    def takes_unnormed(self, num_rows: int) -> bool:
        return num_rows == 1 and self._has_normed_gemv and self._gemv_tuning is not None

    def of_unnormed(self, row: UnnormedRow) -> torch.Tensor:
        from attention.kernels.triton.gemm.normed_gemv import normed_gemv

        assert self._gemv_tuning is not None
        return normed_gemv(row, self.weight, self.bias, self._gemv_tuning)

    def gated_of_unnormed(self, row: UnnormedRow) -> torch.Tensor:
        from attention.kernels.triton.gemm.normed_gemv import normed_gemv_gated

        if self.bias is not None or self._gated_gemv_tuning is None:
            return self._gated_columns(self.of_unnormed(row))
        return normed_gemv_gated(row, self.weight, "silu", self._gated_gemv_tuning)

    def rotates(self, num_rows: int, head_size: int, num_rotated: int) -> bool:
        from attention.kernels.triton.gemm.persistent_rotated import (
            ROTATED_HEAD_SIZE,
            rotates_faster,
        )

        return (
            self._has_rotated
            and self.bias is None
            and head_size == ROTATED_HEAD_SIZE
            and rotates_faster(num_rows, self.weight, num_rotated, self._num_multiprocessors)
        )

    def write_rotated(
        self, x: torch.Tensor, rotary: Rotary, num_rotated: int, out: torch.Tensor
    ) -> None:
        from attention.kernels.triton.gemm.persistent_rotated import persistent_rotated

        persistent_rotated(x, self.weight, rotary, num_rotated, out, self._num_multiprocessors)

    def add_or_return(
        self, stream: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor | SplitRows | None:
        from attention.kernels.triton.gemm.gemv import add_gemv
        from attention.kernels.triton.gemm.skinny import MAX_ROWS

        if len(x) == 1 and self._gemv_tuning is not None:
            add_gemv(stream, x, self.weight, self.bias, self._gemv_tuning)
            return None
        if self._tuning is not None and len(x) <= MAX_ROWS:
            return self(x)
        if self.bias is None and is_faster_split(len(x), self.weight, self._num_multiprocessors):
            return split_product(x, self.weight)
        return super().add_or_return(stream, x)
