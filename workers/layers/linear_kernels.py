"""GEMM kernels of linear layers, `x @ weight.T + bias`: one class for each layout of the weight.

The fastest layout depends on device, dtype and the library that torch uses. It is chosen by a fixed
rule when a layer is built, so that an engine computes the same numbers after every restart.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch.nn import functional

from attention.kernels.cpu.packed_gemm import PackedGemm
from attention.kernels.multiprocessors import num_multiprocessors
from pagedray.rank_roofline import WeightWork
from workers.layers.fused_kernels import gate_kernel
from workers.layers.split_product import is_faster_split, split_product
from workers.layers.weight import WeightShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attention.kernels.new_tokens import Rotary
    from attention.kernels.quantized_rows import QuantizedRows
    from attention.kernels.split_rows import SplitRows
    from attention.kernels.unnormed_row import UnnormedRow
    from workers.layers.weight import MatrixPart

__all__ = [
    "DenseLinear",
    "HopperLinear",
    "LinearKernel",
    "OneDnnLinear",
    "PackedGemmLinear",
    "SharedLayoutLinear",
    "linear_kernel_class",
    "make_linear_kernel",
    "num_padded_rows",
    "replaced_kernels",
]


class LinearKernel(ABC):
    """A weight, its bias if any, and the GEMM that multiplies by them."""

    owns_weight = False
    """Whether nothing else reads the weight, which `finalize` may then overwrite."""
    multiplies_fp8: ClassVar[bool] = False
    """Whether the product with many rows is one of fp8 numbers."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        """`[out_size, in_size]`, loaded before `finalize`, which may repack or drop it."""
        self.bias = bias
        self._weight_bytes = weight.nbytes
        self._gate = gate_kernel("silu", weight.device)

    @classmethod
    def empty(
        cls,
        out_size: int,
        in_size: int,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Return a kernel of these sizes with an uninitialized weight."""
        weight = torch.empty(out_size, in_size, dtype=dtype, device=device)
        bias = torch.empty(out_size, dtype=dtype, device=device) if has_bias else None
        kernel = cls(weight, bias)
        kernel.owns_weight = True
        return kernel

    def weight_shards(self, source: MatrixPart, rows: slice) -> Iterator[WeightShard]:
        """Yield what a checkpoint stores of a weight, which becomes these rows of this one."""
        yield WeightShard(
            name=f"{source.name}.weight",
            shape=source.shape,
            part=source.part,
            target=self.weight[rows],
        )

    def reorder(self, order: torch.Tensor) -> None:
        """Reorder the loaded output columns; must be called before `finalize`."""
        self.weight.copy_(self.weight[order])
        if self.bias is not None:
            self.bias.copy_(self.bias[order])

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weight that a product reads; must be read after `finalize`."""
        return self._weight_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of the weight and the bias; must be read after `finalize`."""
        return self.weight_bytes + (0 if self.bias is None else self.bias.nbytes)

    def work(self, out_size: int, in_size: int) -> WeightWork:
        """Return what a weight of these sizes costs a step; must be called after `finalize`."""
        flop = 2.0 * out_size * in_size
        return WeightWork(
            num_bytes=self.num_bytes,
            row_flop=0.0 if self.multiplies_fp8 else flop,
            fp8_row_flop=flop if self.multiplies_fp8 else 0.0,
        )

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, out_size]` for `[num_rows, in_size]`."""

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write what a call returns to `out`."""
        out.copy_(self(x))

    def part(self, columns: slice) -> LinearKernel | None:
        """Return a kernel of some output columns, with the same weight, if its layout permits."""
        del columns
        return None

    def rotates(self, num_rows: int, head_size: int, num_rotated: int) -> bool:
        """Return whether `write_rotated` takes less time than `write` and a rotation."""
        del num_rows, head_size, num_rotated
        return False

    def write_rotated(
        self, x: torch.Tensor, rotary: Rotary, num_rotated: int, out: torch.Tensor
    ) -> None:
        """Write what a call returns, with the heads in the first columns rotated; if `rotates`."""
        raise NotImplementedError

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Return `silu(first half of the product) * second half`, `[num_rows, out_size / 2]`."""
        return self._gated_columns(self(x))

    def _gated_columns(self, columns: torch.Tensor) -> torch.Tensor:
        if self._gate is not None:
            return self._gate(columns)
        gate, other = columns.chunk(2, dim=1)
        return functional.silu(gate).mul_(other)

    def takes_quantized(self, num_rows: int) -> bool:
        """Return whether `of_quantized` computes what a call would for this number of rows."""
        del num_rows
        return False

    def of_quantized(self, rows: QuantizedRows) -> torch.Tensor:
        """Return `[num_rows, out_size]`; only if `takes_quantized`."""
        raise NotImplementedError

    def takes_unnormed(self, num_rows: int) -> bool:
        """Return whether `of_unnormed` computes what a norm and a call do, for this many rows."""
        del num_rows
        return False

    def of_unnormed(self, row: UnnormedRow) -> torch.Tensor:
        """Return `[1, out_size]`; only if `takes_unnormed`."""
        raise NotImplementedError

    def gated_of_unnormed(self, row: UnnormedRow) -> torch.Tensor:
        """Return what `gated` does, `[1, out_size / 2]`; only if `takes_unnormed`."""
        raise NotImplementedError

    def add_or_return(
        self, stream: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor | SplitRows | None:
        """Add the product to the stream, in place, if one kernel does both; else return it.

        `SplitRows` if that takes less time, and what follows adds the parts.
        """
        del stream
        return self(x)

    def finalize(self) -> None:  # noqa: B027  # A dense weight stays as it is.
        """Convert the loaded weight into the layout of the kernel."""


class DenseLinear(LinearKernel):
    """The weight as loaded: for GPUs, and for CPUs without a better layout."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)

    def part(self, columns: slice) -> LinearKernel:
        bias = None if self.bias is None else self.bias[columns]
        return type(self)(self.weight[columns], bias)

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)

    def add_or_return(
        self, stream: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor | SplitRows | None:
        if self.bias is not None:
            return self(x)
        # The norm that follows then reads and writes two matrices instead of four.
        stream.addmm_(x, self.weight.t())
        return None


class HopperLinear(DenseLinear):
    """A dense weight, and kernels of our own for Hopper GPUs.

    They multiply one row, a few rows, and many rows if the gate of an MLP or a rotation follows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        # Triton is absent on machines without a GPU.
        from attention.kernels.triton.gemm.gemv import default_gemv_tuning
        from attention.kernels.triton.gemm.skinny import default_skinny_tuning
        from attention.kernels.triton.gemm.trials import failed_trials

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
        from attention.kernels.triton.gemm.gemv import gemv
        from attention.kernels.triton.gemm.skinny import MAX_ROWS, skinny_gemm

        if len(x) == 1 and self._gemv_tuning is not None:
            return gemv(x, self.weight, self.bias, self._gemv_tuning)
        if self._tuning is None or len(x) > MAX_ROWS:
            return super().__call__(x)
        return skinny_gemm(x, self.weight, self.bias, self._tuning)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        from attention.kernels.triton.gemm.gemv import gemv_gated
        from attention.kernels.triton.gemm.persistent_gated import keeps_gpu_busy, persistent_gated
        from attention.kernels.triton.gemm.skinny import MAX_ROWS, skinny_gated

        if self.bias is not None:
            return super().gated(x)
        if len(x) > MAX_ROWS:
            num_programs = self._num_multiprocessors
            if self._has_gated and keeps_gpu_busy(len(x), self.weight, num_programs):
                return persistent_gated(x, self.weight, "silu", num_programs)
            return super().gated(x)
        if len(x) == 1 and self._gated_gemv_tuning is not None:
            return gemv_gated(x, self.weight, "silu", self._gated_gemv_tuning)
        if self._gated_tuning is None:
            return super().gated(x)
        return skinny_gated(x, self.weight, "silu", self._gated_tuning)

    def takes_unnormed(self, num_rows: int) -> bool:
        return num_rows == 1 and self._has_normed_gemv and self._gemv_tuning is not None

    def of_unnormed(self, row: UnnormedRow) -> torch.Tensor:
        from attention.kernels.triton.gemm.normed_gemv import normed_gemv

        assert self._gemv_tuning is not None
        return normed_gemv(row, self.weight, self.bias, self._gemv_tuning)

    def gated_of_unnormed(self, row: UnnormedRow) -> torch.Tensor:
        from attention.kernels.triton.gemm.normed_gemv import normed_gemv_gated

        if self.bias is not None or self._gated_gemv_tuning is None:
            return self._gated_columns(self.of_unnormed(row))
        return normed_gemv_gated(row, self.weight, "silu", self._gated_gemv_tuning)

    def rotates(self, num_rows: int, head_size: int, num_rotated: int) -> bool:
        from attention.kernels.triton.gemm.persistent_rotated import (
            ROTATED_HEAD_SIZE,
            rotates_faster,
        )

        return (
            self._has_rotated
            and self.bias is None
            and head_size == ROTATED_HEAD_SIZE
            and rotates_faster(num_rows, self.weight, num_rotated, self._num_multiprocessors)
        )

    def write_rotated(
        self, x: torch.Tensor, rotary: Rotary, num_rotated: int, out: torch.Tensor
    ) -> None:
        from attention.kernels.triton.gemm.persistent_rotated import persistent_rotated

        persistent_rotated(x, self.weight, rotary, num_rotated, out, self._num_multiprocessors)

    def add_or_return(
        self, stream: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor | SplitRows | None:
        from attention.kernels.triton.gemm.gemv import add_gemv
        from attention.kernels.triton.gemm.skinny import MAX_ROWS

        if len(x) == 1 and self._gemv_tuning is not None:
            add_gemv(stream, x, self.weight, self.bias, self._gemv_tuning)
            return None
        if self._tuning is not None and len(x) <= MAX_ROWS:
            return self(x)
        if self.bias is None and is_faster_split(len(x), self.weight, self._num_multiprocessors):
            return split_product(x, self.weight)
        return super().add_or_return(stream, x)


class OneDnnLinear(LinearKernel):
    """The weight in oneDNN's layout, for bfloat16 twice as fast as dense at any row count."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, _ = x.shape
        if num_spare := num_padded_rows(num_rows) - num_rows:
            x = functional.pad(x, (0, 0, 0, num_spare))
        return _linear(x, self.weight, self.bias, "none", [], "")[:num_rows]

    def finalize(self) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(
            self.weight.contiguous(), _PACKED_ROWS
        )


class PackedGemmLinear(OneDnnLinear):
    """The weight in packed tiles for a kernel of our own; oneDNN's layout if it is unavailable.

    Milliseconds for all GEMMs of a model of 41 million weights on two Zen 4 cores, ours and
    oneDNN's: float32, 1 row 4.0 and 6.4, 8 rows 5.2 and 7.8, 32 rows 14.3 and 15.6; bfloat16, 1 row
    1.7 and 3.5, 8 rows 2.4 and 4.1, 32 rows 7.4 and 8.6. For hundreds of rows oneDNN is 2 to 7%
    faster, which the fused gate makes up for.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) if self._packed_gemm is None else self._packed_gemm(x)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return super().gated(x) if self._packed_gemm is None else self._packed_gemm.gated(x)

    def finalize(self) -> None:
        self._packed_gemm = PackedGemm.make(self.weight, self.bias, overwrites=self.owns_weight)
        if self._packed_gemm is None:
            super().finalize()
        else:
            self.weight = self.weight.new_empty(0)


class SharedLayoutLinear(OneDnnLinear):
    """The weight in oneDNN's layout, by which a kernel of our own multiplies a few rows.

    For CPUs on which oneDNN's GEMM is the faster one: those with AMX, or without AVX-512. A few
    rows are limited by memory bandwidth, of which our kernel uses more. If oneDNN has chosen a
    layout that the kernel does not know, it multiplies a few rows too: a second layout would take
    twice the memory.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed_gemm is not None and len(x) <= _FEW_ROWS:
            return self._packed_gemm(x)
        return super().__call__(x)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed_gemm is not None and len(x) <= _FEW_ROWS:
            return self._packed_gemm.gated(x)
        return super().gated(x)

    def finalize(self) -> None:
        loaded = self.weight
        super().finalize()
        self._packed_gemm = PackedGemm.over(_elements(self.weight), loaded, self.bias)


# oneDNN chooses the layout by a row count; that for a batch is fast for one row too.
_PACKED_ROWS = 32
_FEW_ROWS = 16
_ROW_STEP = 16
_MANY_ROWS = 512
# Naming the overload saves a microsecond of lookup per call.
_linear: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default


def _elements(weight: torch.Tensor) -> torch.Tensor:
    """Return the memory of a weight in oneDNN's layout, as long as the weight is there."""
    size = torch.ops.mkldnn._nbytes(weight)
    buffer = (ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(weight))
    return torch.frombuffer(buffer, dtype=weight.dtype)


def num_padded_rows(num_rows: int) -> int:
    """Return the number of rows that a batch is padded to.

    oneDNN compiles and caches a kernel for each number of rows, which takes time and about 1 MB.
    """
    if num_rows <= _FEW_ROWS:
        return num_rows
    step = _ROW_STEP if num_rows <= _MANY_ROWS else 2 * _ROW_STEP
    return -(-num_rows // step) * step


def make_linear_kernel(
    out_size: int, in_size: int, *, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> LinearKernel:
    """Return the fastest kernel of these sizes for this device and dtype."""
    kind = linear_kernel_class(dtype, device)
    return kind.empty(out_size, in_size, has_bias=has_bias, dtype=dtype, device=device)


def linear_kernel_class(dtype: torch.dtype, device: torch.device) -> type[LinearKernel]:
    """Return the class that is fastest for this device and dtype."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        return HopperLinear if _is_hopper(device) else DenseLinear
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return DenseLinear
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if dtype == torch.float32:
        return PackedGemmLinear if has_avx512 else SharedLayoutLinear
    if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        has_amx = torch.cpu._is_amx_tile_supported()
        return PackedGemmLinear if has_avx512 and not has_amx else SharedLayoutLinear
    return DenseLinear


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
