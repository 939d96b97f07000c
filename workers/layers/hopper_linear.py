"""Linear layers on Hopper GPUs, for which some kernels are our own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attention.kernels.arguments import (
    DeferredRMSNorm,
    Rotary,
    RowConv,
    SplitKPartials,
    num_multiprocessors,
)
from attention.kernels.triton.gemm.gemv import add_gemv, default_gemv_tuning, gemv, gemv_gated
from attention.kernels.triton.gemm.normed_gemv import normed_gemv, normed_gemv_gated
from attention.kernels.triton.gemm.persistent_gated import keeps_gpu_busy, persistent_gated
from attention.kernels.triton.gemm.persistent_rotated import (
    ROTATED_HEAD_SIZE,
    persistent_rotated,
    rotates_faster,
)
from attention.kernels.triton.gemm.skinny import (
    MAX_ROWS,
    default_skinny_tuning,
    skinny_gated,
    skinny_gemm,
)
from attention.kernels.triton.gemm.trials import failed_trials
from workers.layers.activation import gated_columns
from workers.layers.linear_kernel import DenseLinear

if TYPE_CHECKING:
    from pagedray.model_config import Activation

__all__ = ["ExactHopperLinear", "HopperLinear", "is_faster_split"]

_NUM_PARTS = 2
_TILE_ROWS, _TILE_COLUMNS = 128, 128
_LEAST_INPUTS = 8192
"""Shorter products were not measured."""


class HopperLinear(DenseLinear):
    """A dense weight, and kernels of our own for Hopper GPUs.

    They multiply one row, a few rows, and many rows if the gate of an MLP or a rotation follows.
    Products that are added to the residual stream may be in parts.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
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
        if len(x) == 1 and self._gemv_tuning is not None:
            return gemv(x, self.weight, self.bias, self._gemv_tuning)
        if self._tuning is None or len(x) > MAX_ROWS:
            return super().__call__(x)
        return skinny_gemm(x, self.weight, self.bias, self._tuning)

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        if self.bias is not None:
            return super().gated(x, activation)
        if len(x) > MAX_ROWS:
            num_programs = self._num_multiprocessors
            assert activation != "relu"
            assert activation != "relu2"
            if self._has_gated and keeps_gpu_busy(len(x), self.weight, num_programs):
                return persistent_gated(x, self.weight, activation, num_programs)
            return super().gated(x, activation)
        if len(x) == 1 and self._gated_gemv_tuning is not None:
            return gemv_gated(x, self.weight, activation, self._gated_gemv_tuning)
        if self._gated_tuning is None:
            return super().gated(x, activation)
        return skinny_gated(x, self.weight, activation, self._gated_tuning)

    def accepts_deferred_norm(self, num_rows: int) -> bool:
        return num_rows == 1 and self._has_normed_gemv and self._gemv_tuning is not None

    def forward_with_norm(
        self, row: DeferredRMSNorm, normed: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert self._gemv_tuning is not None
        return normed_gemv(row, self.weight, self.bias, self._gemv_tuning, normed=normed)

    def convolved_with_norm(self, row: DeferredRMSNorm, conv: RowConv) -> torch.Tensor:
        assert self._gemv_tuning is not None
        return normed_gemv(row, self.weight, self.bias, self._gemv_tuning, conv)

    def gated_with_norm(self, row: DeferredRMSNorm, activation: Activation) -> torch.Tensor:
        if self.bias is not None or self._gated_gemv_tuning is None:
            return gated_columns(self.forward_with_norm(row), activation)
        return normed_gemv_gated(row, self.weight, activation, self._gated_gemv_tuning)

    def rotates(self, num_rows: int, head_size: int, num_rotated: int) -> bool:
        return (
            self._has_rotated
            and self.bias is None
            and head_size == ROTATED_HEAD_SIZE
            and rotates_faster(num_rows, self.weight, num_rotated, self._num_multiprocessors)
        )

    def write_rotated(
        self, x: torch.Tensor, rotary: Rotary, num_rotated: int, out: torch.Tensor
    ) -> None:
        persistent_rotated(x, self.weight, rotary, num_rotated, out, self._num_multiprocessors)

    def forward_residual(
        self, stream: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor | SplitKPartials | None:
        if len(x) == 1 and self._gemv_tuning is not None:
            add_gemv(stream, x, self.weight, self.bias, self._gemv_tuning)
            return None
        if self._tuning is not None and len(x) <= MAX_ROWS:
            return self(x)
        if self.bias is None and is_faster_split(len(x), self.weight, self._num_multiprocessors):
            return split_product(x, self.weight)
        return super().forward_residual(stream, x)


class ExactHopperLinear(DenseLinear):
    """A weight in float32 for rows in 16 bits; results are in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        failed = failed_trials(weight.device)
        self._tuning = default_gemv_tuning(weight, is_gated=False)
        if "gemv" in failed:
            self._tuning = None
        self._has_normed_gemv = "normed_gemv" not in failed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1 and self._tuning is not None:
            return gemv(x, self.weight, self.bias, self._tuning)
        return super().__call__(x.float())

    def accepts_deferred_norm(self, num_rows: int) -> bool:
        return num_rows == 1 and self._has_normed_gemv and self._tuning is not None

    def forward_with_norm(
        self, row: DeferredRMSNorm, normed: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert self._tuning is not None
        return normed_gemv(row, self.weight, self.bias, self._tuning, normed=normed)


def is_faster_split(num_rows: int, weight: torch.Tensor, num_multiprocessors: int) -> bool:
    """Return whether a product and a norm take less time with `split_product`.

    `weight` is `[out_size, in_size]`. They do if all parts of all tiles run at the same time.
    """
    out_size, in_size = weight.shape
    num_tiles = -(-num_rows // _TILE_ROWS) * -(-out_size // _TILE_COLUMNS)
    is_long = in_size >= _LEAST_INPUTS and in_size % (_NUM_PARTS * _TILE_COLUMNS) == 0
    return is_long and _NUM_PARTS * num_tiles <= num_multiprocessors


def split_product(x: torch.Tensor, weight: torch.Tensor) -> SplitKPartials:
    """Return `x @ weight.T` in parts, on a GPU.

    `x` is `[num_rows, in_size]`, and `weight` `[out_size, in_size]`, both in 16 bits.
    """
    inputs = x.unflatten(1, (_NUM_PARTS, -1)).transpose(0, 1)
    weights = weight.unflatten(1, (_NUM_PARTS, -1)).permute(1, 2, 0)
    return SplitKPartials(torch.bmm(inputs, weights, out_dtype=torch.float32))
