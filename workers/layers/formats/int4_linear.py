"""Products with int4 weights on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from attention.kernels.triton.gemm.gemv import GemvTuning, default_gemv_tuning, gemv, gemv_gated
from attention.kernels.triton.gemm.int4 import (
    MAX_GATED_ROWS,
    MAX_ROWS,
    dequantize_int4,
    int4_gated,
    int4_gemm,
    packed_int4,
    scale_words,
)
from attention.kernels.triton.gemm.trials import failed_trials
from workers.layers.formats.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from pagedray.model_config import Activation
    from workers.layers.formats.int4_weight import Int4Weight

__all__ = ["GpuInt4Linear"]


class GpuInt4Linear(QuantizedLinear):
    """The product with an int4 weight, which is unpacked in registers for up to 64 rows.

    A single row is multiplied by a GEMV, and for more than 64 rows the weight is dequantized in
    each step. The GEMV multiplies in float16, which is not precise enough for a row in float32.
    """

    def __init__(self, stored: Int4Weight, bias: torch.Tensor | None, device: torch.device) -> None:
        super().__init__(stored, bias, device)
        self._int4 = stored
        self._packed = self._words = torch.empty(0)
        self._gemv_tuning: GemvTuning | None = None
        self._gated_gemv_tuning: GemvTuning | None = None

    @property
    def weight_bytes(self) -> int:
        return self._packed.nbytes + self._words.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        int4 = self._int4
        if int4.input_order is not None:
            x = x.index_select(1, int4.input_order)
        if len(x) == 1 and x.element_size() == 2 and self._gemv_tuning is not None:
            return gemv(x, self._packed, self.bias, self._gemv_tuning, scales=self._words)
        if len(x) <= MAX_ROWS:
            return int4_gemm(x, self._packed, self._words, self.bias)
        weight = dequantize_int4(self._packed, self._words, x.dtype)
        return functional.linear(x, weight, self.bias)

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        int4 = self._int4
        if self.bias is not None or len(x) > MAX_GATED_ROWS:
            return super().gated(x, activation)
        if int4.input_order is not None:
            x = x.index_select(1, int4.input_order)
        tuning = self._gated_gemv_tuning
        if len(x) == 1 and x.element_size() == 2 and tuning is not None:
            return gemv_gated(x, self._packed, activation, tuning, scales=self._words)
        return int4_gated(x, self._packed, self._words, activation)

    def finalize(self) -> None:
        super().finalize()
        int4 = self._int4
        self._packed = packed_int4(int4.numbers, int4.group_size)
        self._words = scale_words(int4.scales, int4.zeros)
        self._gemv_tuning = default_gemv_tuning(self._packed, is_gated=False)
        self._gated_gemv_tuning = default_gemv_tuning(self._packed, is_gated=True)
        if "gemv" in failed_trials(self._packed.device):
            self._gemv_tuning = self._gated_gemv_tuning = None
        int4.numbers = int4.scales = int4.zeros = torch.empty(0)
