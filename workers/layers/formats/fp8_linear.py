"""Products with fp8 weights on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attention.kernels.arguments import QuantizedRows, num_multiprocessors
from attention.kernels.triton.fp8_rows import quantize_blocks, quantize_rows
from attention.kernels.triton.gemm.block_fp8 import block_fp8_gemm
from attention.kernels.triton.gemm.fp8_tiles import fp8_tiles_gemm, fp8_tiling, new_arrivals
from attention.kernels.triton.gemm.gemv import default_gemv_tuning, gemv, gemv_gated
from attention.kernels.triton.gemm.skinny import (
    MAX_ROWS,
    fp8_skinny_tuning,
    skinny_gated,
    skinny_gemm,
)
from attention.kernels.triton.gemm.trials import failed_trials
from pagedray.errors import DeviceError
from workers.layers.formats.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from pagedray.model_config import Activation
    from workers.layers.formats.fp8_weight import Fp8Weight

__all__ = ["BlockFp8Linear", "Fp8Linear"]

_DEPTHS = (32, 64, 128)
_SIZE_STEP = 16
"""The library multiplies matrices whose sizes are multiples of this."""


class Fp8Linear(QuantizedLinear):
    """The product with an fp8 weight: more than 16 rows of inputs are quantized for tensor cores.

    Fewer rows are not, and then a scale of inputs in the checkpoint is not used.
    """

    multiplies_fp8 = True

    def __init__(
        self, stored: Fp8Weight, bias: torch.Tensor | None, *, name: str, device: torch.device
    ) -> None:
        super().__init__(stored, bias, device)
        out_size, in_size = stored.values.shape
        if out_size % _SIZE_STEP or in_size % _SIZE_STEP:
            raise DeviceError(
                f"{name} has {in_size} inputs and {out_size} outputs on each rank, but products in "
                f"fp8 need multiples of {_SIZE_STEP}; use fewer ranks, or weights in bfloat16."
            )
        self._fp8 = stored
        self._num_multiprocessors = num_multiprocessors(device)
        self._tuning = fp8_skinny_tuning(out_size, in_size, stored.depth, is_gated=False)
        self._gated_tuning = fp8_skinny_tuning(out_size, in_size, stored.depth, is_gated=True)
        self._gemv_tuning = default_gemv_tuning(stored.values, is_gated=False)
        self._gated_gemv_tuning = default_gemv_tuning(stored.values, is_gated=True)
        if in_size % stored.depth or stored.depth % _SIZE_STEP:
            self._gemv_tuning = self._gated_gemv_tuning = None
        failed = failed_trials(device)
        if "skinny" in failed:
            self._tuning = self._gated_tuning = None
        if "gemv" in failed:
            self._gemv_tuning = self._gated_gemv_tuning = None
        can_tile = bias is None and "fp8_tiles" not in failed
        self._arrivals = new_arrivals(out_size, device) if can_tile else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        fp8 = self._fp8
        if len(x) == 1 and self._gemv_tuning is not None:
            return gemv(x, fp8.values, self.bias, self._gemv_tuning, scales=fp8.scales)
        if self._tuning is not None and len(x) <= MAX_ROWS:
            return skinny_gemm(x, fp8.values, self.bias, self._tuning, scales=fp8.scales)
        return self._product(x)

    @property
    def weight_bytes(self) -> int:
        return self._fp8.values.nbytes + self._fp8.scales.nbytes

    def accepts_quantized(self, num_rows: int) -> bool:
        return num_rows > MAX_ROWS and self._fp8.input_scale is None

    def forward_quantized(self, rows: QuantizedRows) -> torch.Tensor:
        fp8 = self._fp8
        if self._arrivals is not None:
            out_size, in_size = fp8.values.shape
            tiling = fp8_tiling(len(rows), out_size, in_size, self._num_multiprocessors)
            if tiling is not None:
                return fp8_tiles_gemm(rows, fp8.values, fp8.scales, tiling, self._arrivals)
        return torch._scaled_mm(
            rows.values,
            fp8.values.t(),
            scale_a=rows.scales,
            scale_b=fp8.scales.t(),
            bias=self.bias,
            out_dtype=rows.dtype,
            use_fast_accum=True,
        )

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with rows that are quantized here, by the library."""
        return self.forward_quantized(quantize_rows(x, self._fp8.input_scale))

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        fp8 = self._fp8
        if self.bias is not None or len(x) > MAX_ROWS:
            return super().gated(x, activation)
        if len(x) == 1 and self._gated_gemv_tuning is not None:
            return gemv_gated(x, fp8.values, activation, self._gated_gemv_tuning, scales=fp8.scales)
        if self._gated_tuning is None:
            return super().gated(x, activation)
        return skinny_gated(x, fp8.values, activation, self._gated_tuning, scales=fp8.scales)


class BlockFp8Linear(Fp8Linear):
    """As `Fp8Linear`, with a scale for each block of inputs, and of a row of a weight."""

    def __init__(
        self, stored: Fp8Weight, bias: torch.Tensor | None, *, name: str, device: torch.device
    ) -> None:
        super().__init__(stored, bias, name=name, device=device)
        if stored.depth not in _DEPTHS:
            raise DeviceError(
                f"{name} has scales for blocks of {stored.depth} inputs, but on GPUs products in "
                f"fp8 need blocks of {', '.join(map(str, _DEPTHS))}; use weights in bfloat16."
            )

    def accepts_quantized(self, num_rows: int) -> bool:
        return False

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        fp8 = self._fp8
        rows, row_scales = quantize_blocks(x, fp8.depth)
        return block_fp8_gemm(
            rows, row_scales, fp8.values, fp8.scales, self.bias, depth=fp8.depth, dtype=x.dtype
        )
