"""Chooses the kernels of linear layers, `x @ weight.T + bias`.

The fastest layout of a weight depends on device, dtype and the library that torch uses. It is
chosen by a fixed rule when a layer is built, so that an engine computes the same numbers after
every restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workers.layers.linear_kernels.linear_kernel import DenseLinear
from workers.layers.linear_kernels.onednn_linear import PackedGemmLinear, SharedLayoutLinear

if TYPE_CHECKING:
    from workers.layers.linear_kernels.linear_kernel import LinearKernel

__all__ = ["linear_kernel_class", "make_linear_kernel", "replaced_kernels"]


def make_linear_kernel(
    out_size: int, in_size: int, *, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> LinearKernel:
    """Return the fastest kernel of these sizes for this device and dtype."""
    kind = linear_kernel_class(dtype, device)
    return kind.empty(out_size, in_size, has_bias=has_bias, dtype=dtype, device=device)


def linear_kernel_class(dtype: torch.dtype, device: torch.device) -> type[LinearKernel]:
    """Return the class that is fastest for this device and dtype."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        if not _is_hopper(device):
            return DenseLinear
        # Triton is absent on machines without a GPU.
        from workers.layers.linear_kernels.hopper_linear import HopperLinear

        return HopperLinear
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return DenseLinear
    capability = torch.backends.cpu.get_cpu_capability()
    if dtype == torch.float32:
        return PackedGemmLinear if capability == "AVX512" else SharedLayoutLinear
    if dtype != torch.bfloat16:
        return DenseLinear
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        has_amx = torch.cpu._is_amx_tile_supported()
        return PackedGemmLinear if capability == "AVX512" and not has_amx else SharedLayoutLinear
    return PackedGemmLinear if capability == "AVX2" else DenseLinear


def replaced_kernels(device: torch.device) -> tuple[str, ...]:
    """Return the kernels for a device that do not compile there, so that others replace them."""
    if device.type != "cuda" or not _is_hopper(device):
        return ()
    # Triton is absent on machines without a GPU.
    from attention.kernels.triton.gemm.trials import failed_trials

    return tuple(sorted(failed_trials(device)))


def _is_hopper(device: torch.device) -> bool:
    """Return whether a GPU is of the generation on which our kernels were tuned."""
    return torch.cuda.get_device_capability(device) == (9, 0)
