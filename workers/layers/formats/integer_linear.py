"""Products of bfloat16 with weights of small integers on CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attention.kernels.cpu.integer_gemm import IntegerGemm, has_integer_gemm
from workers.layers.formats.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from workers.layers.formats.int4_weight import Int4Weight
    from workers.layers.formats.int8_weight import Int8Weight

__all__ = ["CpuInt4Linear", "CpuInt8Linear"]


class _CpuIntegerLinear(QuantizedLinear):
    """The numbers as they are stored, in packed tiles for a kernel of ours."""

    _gemm: IntegerGemm

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Return whether the kernel computes in this dtype, and could be compiled."""
        return dtype == torch.bfloat16 and has_integer_gemm()

    @property
    def weight_bytes(self) -> int:
        return self._gemm.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._gemm(x)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return self._gemm.gated(x)


class CpuInt4Linear(_CpuIntegerLinear):
    """The product with a weight of four bits; its inputs may be in another order."""

    def __init__(self, stored: Int4Weight, bias: torch.Tensor | None, device: torch.device) -> None:
        super().__init__(stored, bias, device)
        self._int4 = stored

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(self._ordered(x))

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return super().gated(self._ordered(x))

    def finalize(self) -> None:
        super().finalize()
        int4 = self._int4
        self._gemm = IntegerGemm(int4.numbers, int4.scales, int4.zeros, self.bias, num_bits=4)
        int4.numbers = int4.scales = int4.zeros = torch.empty(0)

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        order = self._int4.input_order
        return x if order is None else x.index_select(1, order)


class CpuInt8Linear(_CpuIntegerLinear):
    """The product with a weight of eight bits."""

    def __init__(self, stored: Int8Weight, bias: torch.Tensor | None, device: torch.device) -> None:
        super().__init__(stored, bias, device)
        self._int8 = stored

    def finalize(self) -> None:
        super().finalize()
        int8 = self._int8
        self._gemm = IntegerGemm(int8.numbers, int8.scales, None, self.bias, num_bits=8)
        int8.numbers = int8.scales = torch.empty(0)
