"""Chooses the product of a linear layer by the format of its weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedray.errors import DeviceError
from pagedray.weight_format import Fp8Format, Int4Format, Int8Format
from workers.layers.formats.fp8_weight import Fp8Weight
from workers.layers.formats.int4_weight import Int4Weight
from workers.layers.formats.int8_weight import Int8Weight
from workers.layers.formats.integer_linear import CpuInt4Linear, CpuInt8Linear
from workers.layers.formats.quantized_linear import DequantizedLinear
from workers.layers.linear_kernels.choice import make_linear_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedray.weight_format import Quantization
    from workers.layers.linear_kernels.linear_kernel import LinearKernel

__all__ = ["make_format_kernel"]

_HOPPER = (9, 0)


def make_format_kernel(
    names: Sequence[str],
    quantization: Quantization | None,
    out_size: int,
    in_size: int,
    *,
    has_bias: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> LinearKernel:
    """Return the product of the layers of these names, `[out_size, in_size]` on this rank.

    Raises CheckpointError, and DeviceError if the device cannot compute it.
    """
    format = quantization.format_of(names) if quantization is not None else None
    if format is None:
        return make_linear_kernel(out_size, in_size, has_bias=has_bias, dtype=dtype, device=device)
    if isinstance(format, Fp8Format) and device.type == "cuda":
        _check_gpu(names[0], dtype, device)
    bias = torch.empty(out_size, dtype=dtype, device=device) if has_bias else None
    if isinstance(format, Int4Format):
        int4 = Int4Weight(format, out_size, in_size, device=device)
        if format.num_bits == 4 and device.type == "cuda":
            # Triton is absent on machines without a GPU.
            from workers.layers.formats.int4_linear import GpuInt4Linear

            return GpuInt4Linear(int4, bias, device)
        if format.num_bits == 4 and CpuInt4Linear.supports(dtype):
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
