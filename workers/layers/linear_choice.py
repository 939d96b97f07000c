"""Chooses the kernels of linear layers, `x @ weight.T + bias`, and has the kernels of CPUs.

The fastest layout of a weight depends on device, dtype and the library that torch uses. It is
chosen by a fixed rule when a layer is built, so that an engine computes the same numbers after
every restart.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from attention.kernels.cpu.instruction_set import has_amx
from attention.kernels.cpu.packed_gemm import PackedGemm
from workers.layers.linear_kernel import DenseLinear, LinearKernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedray.model_config import Activation

__all__ = [
    "OneDnnLinear",
    "PackedGemmLinear",
    "SharedLayoutLinear",
    "linear_kernel_class",
    "make_exact_kernel",
    "make_linear_kernel",
    "num_padded_rows",
    "replaced_kernels",
]

# oneDNN chooses the layout by a row count; that for a batch is fast for one row too.
_PACKED_ROWS = 32
# Up to so many rows are multiplied by a kernel of our own in oneDNN's layout, where it is faster.
# Microseconds of a gate of 3 072 x 512 on two cores with AMX, ours and oneDNN's: 32 rows 136 and
# 192, 64 rows 192 and 242, 128 rows 344 and 344.
_FEW_ROWS = {torch.float32: 16, torch.bfloat16: 12}
_FEW_ROWS_WITH_AMX = {**_FEW_ROWS, torch.bfloat16: 64}
# Naming the overload saves a microsecond of lookup per call.
_linear: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default


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
        from workers.layers.hopper_linear import HopperLinear

        return HopperLinear
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return DenseLinear
    capability = torch.backends.cpu.get_cpu_capability()
    if dtype == torch.float32:
        return PackedGemmLinear if capability == "AVX512" else SharedLayoutLinear
    if dtype != torch.bfloat16:
        return DenseLinear
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        is_packed = capability == "AVX512" and not torch.cpu._is_amx_tile_supported()
        return PackedGemmLinear if is_packed else SharedLayoutLinear
    return PackedGemmLinear if capability == "AVX2" else DenseLinear


def make_exact_kernel(
    out_size: int, in_size: int, *, has_bias: bool, device: torch.device
) -> LinearKernel | None:
    """Return the kernel of a weight in float32 for rows in 16 bits, if there is one."""
    if device.type != "cuda" or not _is_hopper(device):
        return None
    # Triton is absent on machines without a GPU.
    from workers.layers.hopper_linear import ExactHopperLinear

    return ExactHopperLinear.empty(
        out_size, in_size, has_bias=has_bias, dtype=torch.float32, device=device
    )


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


class OneDnnLinear(LinearKernel):
    """The weight in oneDNN's layout, for bfloat16 twice as fast as dense at any row count.

    If oneDNN does not multiply bfloat16 on this CPU, such a weight stays as it was loaded.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.weight.is_mkldnn:
            return functional.linear(x, self.weight, self.bias)
        num_rows, _ = x.shape
        if num_spare := num_padded_rows(num_rows) - num_rows:
            x = functional.pad(x, (0, 0, 0, num_spare))
        return _linear(x, self.weight, self.bias, "none", [], "")[:num_rows]

    def finalize(self) -> None:
        if self.weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self.weight = torch.ops.mkldnn._reorder_linear_weight(
                self.weight.contiguous(), _PACKED_ROWS
            )


class PackedGemmLinear(OneDnnLinear):
    """The weight in packed tiles for a kernel of our own; oneDNN's layout if it is unavailable.

    Milliseconds for all GEMMs of a model of 41 million weights on two Zen 4 cores, ours and
    oneDNN's: float32, 1 row 4.0 and 6.4, 8 rows 5.2 and 7.8, 32 rows 14.3 and 15.6; bfloat16, 1 row
    1.7 and 3.5, 8 rows 2.4 and 4.1, 32 rows 7.4 and 8.6. For hundreds of rows oneDNN is 2 to 7%
    faster, which the fused gate makes up for. With AVX2 alone, bfloat16 is multiplied as floats,
    which torch does not do: on Zen 5, 32 decodes of this model take a third of the time.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) if self._packed_gemm is None else self._packed_gemm(x)

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        if self._packed_gemm is not None and activation == "silu":
            return self._packed_gemm.gated(x)
        return super().gated(x, activation)

    def finalize(self) -> None:
        self._packed_gemm = PackedGemm.make(self.weight, self.bias, overwrites=self.owns_weight)
        if self._packed_gemm is None:
            super().finalize()
        else:
            self.weight = self.weight.new_empty(0)


class SharedLayoutLinear(OneDnnLinear):
    """The weight in oneDNN's layout, with which our own kernel multiplies a few rows.

    For CPUs with a faster GEMM of oneDNN: in bfloat16 CPUs with AMX, in float32 CPUs without
    AVX-512. A few rows are limited by memory bandwidth, of which our kernel uses more. If oneDNN
    has chosen a layout that the kernel does not know, oneDNN multiplies a few rows too: a second
    layout would take twice the memory.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed_gemm is not None and len(x) <= self._few_rows:
            return self._packed_gemm(x)
        return super().__call__(x)

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        is_few = len(x) <= self._few_rows and activation == "silu"
        if self._packed_gemm is not None and is_few:
            return self._packed_gemm.gated(x)
        return super().gated(x, activation)

    def finalize(self) -> None:
        loaded = self.weight
        self._few_rows = (_FEW_ROWS_WITH_AMX if has_amx() else _FEW_ROWS).get(loaded.dtype, 0)
        super().finalize()
        self._packed_gemm = PackedGemm.over(_elements(self.weight), loaded, self.bias)


def _elements(weight: torch.Tensor) -> torch.Tensor:
    """Return the memory of a weight in oneDNN's layout, as long as the weight is there."""
    size = torch.ops.mkldnn._nbytes(weight)
    buffer = (ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(weight))
    return torch.frombuffer(buffer, dtype=weight.dtype)


def num_padded_rows(num_rows: int) -> int:
    """Return the number of rows that a batch is padded to.

    oneDNN compiles and caches a kernel for each number of rows, which takes time and about 1 MB.
    """
    if num_rows <= 16:
        return num_rows
    step = 4 if num_rows <= 32 else 8 if num_rows <= 64 else 16 if num_rows <= 512 else 32
    return -(-num_rows // step) * step
