"""Products with int4 weights: by kernels of ours on GPUs, by torch's on CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from workers.layers.formats.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from workers.layers.formats.int4_weight import Int4Weight

__all__ = ["CpuInt4Linear", "GpuInt4Linear"]

_MIDDLE = 8
"""The number that stands for zero in torch's product."""
_OUT_STEP = 16
_GROUP_SIZES = (32, 64, 128, 256)
# From here on, dequantizing takes less time than torch's product.
_MANY_ROWS = 96
_ROWS_AT_ONCE = 256
_PAIRS = torch.tensor(
    [[byte % 16 - _MIDDLE, byte // 16 - _MIDDLE] for byte in range(256)], dtype=torch.bfloat16
).view(torch.int32)
"""Both numbers of a byte, less `_MIDDLE`, `[256, 1]`."""


class CpuInt4Linear(QuantizedLinear):
    """Torch's product of bfloat16 and int4; for many rows, parts of the weight are dequantized.

    The numbers are stored in a layout for each, together in a byte. Milliseconds of 16384 x 2048
    weights on one core of a Xeon with AMX, by this product, dequantized, and in bfloat16: 1 row
    2.0, 54 and 9.6; 8 rows 6.6, 55 and 7.6; 64 rows 48, 64 and 12; 256 rows 188, 80 and 18.
    """

    def __init__(self, stored: Int4Weight, bias: torch.Tensor | None, device: torch.device) -> None:
        super().__init__(stored, bias, device)
        self._int4 = stored
        self._packed = self._pairs = self._scales = torch.empty(0)

    @staticmethod
    def supports(out_size: int, group_size: int, dtype: torch.dtype) -> bool:
        """Return whether torch has a fast product of these sizes."""
        is_whole = out_size % _OUT_STEP == 0 and group_size in _GROUP_SIZES
        return is_whole and dtype == torch.bfloat16

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        order = self._int4.input_order
        if order is not None:
            x = x.index_select(1, order)
        out: torch.Tensor
        if len(x) >= _MANY_ROWS:
            out = self._dequantized_product(x)
        else:
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.contiguous(), self._packed, self._int4.group_size, self._scales
            )
        return out if self.bias is None else out.add_(self.bias)

    def finalize(self) -> None:
        super().finalize()
        int4 = self._int4
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            int4.numbers.to(torch.int32), 1
        )
        self._pairs = int4.numbers[:, ::2] | int4.numbers[:, 1::2] << 4
        zeros = (_MIDDLE - int4.zeros.float()) * int4.scales
        # [groups, out_size, 2]
        self._scales = torch.stack((int4.scales.t(), zeros.t()), dim=2).to(torch.bfloat16)
        int4.numbers = int4.scales = int4.zeros = torch.empty(0)

    def _dequantized_product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with some rows of the weight after the other, while in cache."""
        num_groups, out_size, _ = self._scales.shape
        out = x.new_empty(len(x), out_size)
        for first in range(0, out_size, _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            pairs = self._pairs[rows]
            numbers = _PAIRS.index_select(0, pairs.flatten().int()).view(torch.bfloat16)
            scales, zeros = self._scales[:, rows].permute(2, 1, 0).unsqueeze(3)
            weight = numbers.view(len(pairs), num_groups, -1).mul_(scales).add_(zeros)
            out[:, rows] = functional.linear(x, weight.flatten(1))
        return out


class GpuInt4Linear(QuantizedLinear):
    """Up to 64 rows are multiplied by numbers that are unpacked in registers.

    For more, the weight is dequantized in each step.
    """

    def __init__(self, stored: Int4Weight, bias: torch.Tensor | None, device: torch.device) -> None:
        super().__init__(stored, bias, device)
        self._int4 = stored
        self._packed = self._words = torch.empty(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # Triton is absent on machines without a GPU.
        from attention.kernels.triton.gemm.int4 import MAX_ROWS, dequantize_int4, int4_gemm

        int4 = self._int4
        if int4.input_order is not None:
            x = x.index_select(1, int4.input_order)
        if len(x) <= MAX_ROWS:
            return int4_gemm(x, self._packed, self._words, self.bias)
        weight = dequantize_int4(self._packed, self._words, x.dtype)
        return functional.linear(x, weight, self.bias)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        from attention.kernels.triton.gemm.int4 import MAX_GATED_ROWS, int4_gated

        int4 = self._int4
        if self.bias is not None or len(x) > MAX_GATED_ROWS:
            return super().gated(x)
        if int4.input_order is not None:
            x = x.index_select(1, int4.input_order)
        return int4_gated(x, self._packed, self._words, "silu")

    def finalize(self) -> None:
        from attention.kernels.triton.gemm.int4 import packed_int4, scale_words

        super().finalize()
        int4 = self._int4
        self._packed = packed_int4(int4.numbers, int4.group_size)
        self._words = scale_words(int4.scales, int4.zeros)
        int4.numbers = int4.scales = int4.zeros = torch.empty(0)
