"""Chooses the product of a linear layer by the format of its weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attention.kernels.cpu.integer_gemm import IntegerGemm, has_integer_gemm
from pagedray.errors import DeviceError
from pagedray.weight_format import Fp8Format, Int4Format, Int8Format
from workers.layers.formats.fp8_weight import Fp8Weight
from workers.layers.formats.int4_weight import Int4Weight
from workers.layers.formats.int8_weight import Int8Weight
from workers.layers.formats.quantized_linear import DequantizedLinear, QuantizedLinear
from workers.layers.linear_choice import make_linear_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedray.model_config import Activation
    from workers.layers.linear_kernel import LinearKernel
    from workers.layers.weight import Placement

__all__ = ["CpuInt8Linear", "make_format_kernel"]

_HOPPER = (9, 0)


def make_format_kernel(
    names: Sequence[str], out_size: int, in_size: int, place: Placement, *, has_bias: bool
) -> LinearKernel:
    """Return the product of the layers of these names, `[out_size, in_size]` on this rank.

    Raises CheckpointError, and DeviceError if the device cannot compute it.
    """
    quantization, dtype, device = place.quantization, place.dtype, place.device
    format = quantization.format_of(names) if quantization is not None else None
    if format is None:
        return make_linear_kernel(out_size, in_size, has_bias=has_bias, dtype=dtype, device=device)
    if isinstance(format, Fp8Format) and device.type == "cuda":
        _check_gpu(names[0], dtype, device)
    bias = torch.empty(out_size, dtype=dtype, device=device) if has_bias else None
    if isinstance(format, Int4Format):
        int4 = Int4Weight(format, out_size, in_size, device=device)
        if format.num_bits == 4 and device.type == "cuda" and not format.has_minimums:
            # Triton is absent on machines without a GPU.
            from workers.layers.formats.int4_linear import GpuInt4Linear

            return GpuInt4Linear(int4, bias, device)
        if format.num_bits == 4 and device.type == "cpu" and CpuInt4Linear.supports(dtype):
            return CpuInt4Linear(int4, bias, device)
        return DequantizedLinear(int4, bias, dtype=dtype, device=device)
    if isinstance(format, Int8Format):
        int8 = Int8Weight(format, out_size, in_size, device=device)
        if device.type == "cpu" and CpuInt8Linear.supports(dtype):
            return CpuInt8Linear(int8, bias, device)
        return DequantizedLinear(int8, bias, dtype=dtype, device=device)
    fp8 = Fp8Weight(format, out_size, in_size, device=device)
    if device.type != "cuda":
        return DequantizedLinear(fp8, bias, dtype=dtype, device=device)
    from workers.layers.formats.fp8_linear import BlockFp8Linear, Fp8Linear

    kind = BlockFp8Linear if format.scales == "block" else Fp8Linear
    return kind(fp8, bias, name=names[0], device=device)


def _check_gpu(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise DeviceError if a GPU cannot multiply by the layer's weight in fp8."""
    if dtype != torch.bfloat16:
        raise DeviceError(f"{name} is in fp8, whose products need --dtype bfloat16 on a GPU.")
    capability = torch.cuda.get_device_capability(device)
    if capability < _HOPPER:
        raise DeviceError(
            f"{name} is in fp8, whose products need a GPU of compute capability 9.0 or later, but "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}; use "
            "weights in bfloat16."
        )


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

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return self._gemm.gated(x) if activation == "silu" else super().gated(x, activation)


class CpuInt4Linear(_CpuIntegerLinear):
    """The product with a weight of four bits; its inputs may be in another order."""

    def __init__(self, stored: Int4Weight, bias: torch.Tensor | None, device: torch.device) -> None:
        super().__init__(stored, bias, device)
        self._int4 = stored

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(self._ordered(x))

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        if activation == "silu":
            return self._gemm.gated(self._ordered(x))
        return super().gated(x, activation)

    def finalize(self) -> None:
        super().finalize()
        int4 = self._int4
        middle = int4.values_of_middle()
        self._gemm = IntegerGemm(int4.numbers, int4.scales, middle, self.bias, num_bits=4)
        int4.numbers = int4.scales = int4.zeros = torch.empty(0)
        int4.minimums = None

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
