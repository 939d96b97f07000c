"""Products of bfloat16 with weights of small integers on CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attention.kernels.cpu.integer_gemm import IntegerGemm, has_integer_gemm
from workers.layers.formats.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from workers.layers.formats.int4_weight import Int4Weight

__all__ = ["CpuIntegerLinear"]


class CpuIntegerLinear(QuantizedLinear):
    """The numbers as they are stored, in packed tiles for a kernel of ours."""

    def __init__(self, stored: Int4Weight, bias: torch.Tensor | None, device: torch.device) -> None:
        super().__init__(stored, bias, device)
        self._integers = stored
        self._gemm: IntegerGemm | None = None

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Return whether the kernel computes in this dtype, and could be compiled."""
        return dtype == torch.bfloat16 and has_integer_gemm()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self._gemm is not None
        return self._gemm(self._ordered(x))

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        assert self._gemm is not None
        return self._gemm.gated(self._ordered(x))

    def finalize(self) -> None:
        super().finalize()
        stored = self._integers
        self._gemm = IntegerGemm(stored.numbers, stored.scales, stored.zeros, self.bias, num_bits=4)
        stored.numbers = stored.scales = stored.zeros = torch.empty(0)

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        order = self._integers.input_order
        return x if order is None else x.index_select(1, order)
