"""Products of few rows with a weight, on the CPU, at the rate of memory."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Self

import torch

from attention.kernels.native import load_kernels

__all__ = ["RowsProduct"]

_SUFFIXES = {torch.float32: "float", torch.bfloat16: "bfloat"}
# From here on libraries win: on two Sapphire Rapids cores, (3072, 512), float32, 8 rows take
# 238 us here and 308 packed, 32 rows 576 and 507; bfloat16, 4 rows 80 and 99, 8 rows 148 and 105.
_MAX_ROWS = {torch.float32: 8, torch.bfloat16: 4}


class _Shape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("num_rows", "in_size", "out_size", "x_stride", "is_gated")
    )


class RowsProduct:
    """The kernel for one weight, `[out_size, in_size]`, that outlives it."""

    def __init__(
        self,
        kernel: ctypes._NamedFuncPointer,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        is_gated: bool,
    ) -> None:
        out_size, in_size = weight.shape
        self.max_rows = _MAX_ROWS[weight.dtype]
        """Rows from 1 to this are worth the kernel."""
        self._kernel = kernel
        self._held = (weight, bias)
        self._out_size = out_size // 2 if is_gated else out_size
        self._shape = _Shape(in_size=in_size, out_size=self._out_size, is_gated=int(is_gated))
        self._shape_address = ctypes.addressof(self._shape)
        self._weight_address = weight.data_ptr()
        self._bias_address = None if bias is None else bias.data_ptr()

    @classmethod
    def make(
        cls, weight: torch.Tensor, bias: torch.Tensor | None, *, is_gated: bool = False
    ) -> Self | None:
        """Return the kernel, or None where it does not serve or is not to be had.

        A gated weight holds the rows of a gate, then those of what it lets through: the result is
        `silu(gate) * other`, half as wide.
        """
        is_served = (
            weight.device.type == "cpu" and weight.dtype in _SUFFIXES and weight.is_contiguous()
        )
        library = _library() if is_served else None
        if library is None:
            return None
        kernel = library[f"rows_product_{_SUFFIXES[weight.dtype]}"]
        kernel.argtypes = [ctypes.c_void_p] * 5
        kernel.restype = None
        return cls(kernel, weight, bias, is_gated=is_gated)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, out_size]` for `[num_rows, in_size]`, for any number of rows."""
        num_rows = x.shape[0]
        out = x.new_empty((num_rows, self._out_size))
        shape = self._shape
        shape.num_rows, shape.x_stride = num_rows, x.stride(0)
        self._kernel(
            self._shape_address,
            x.data_ptr(),
            self._weight_address,
            self._bias_address,
            out.data_ptr(),
        )
        return out


@cache
def _library() -> ctypes.CDLL | None:
    return load_kernels(Path(__file__).with_suffix(".c"))
