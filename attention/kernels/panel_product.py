"""Products of rows with a weight, on the CPU: few at the rate of memory, many at the CPU's peak."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Self

import torch
from torch.nn import functional

from attention.kernels.native import load_kernels

__all__ = ["PanelProduct"]

_SUFFIXES = {torch.float32: "float", torch.bfloat16: "bfloat"}
# As in the kernel: the columns of a panel, the elements of a row that one step of a sum takes, and
# the steps of a group, to which panels are padded with zeros.
_PANEL = 32
_STEP = {torch.float32: 1, torch.bfloat16: 2}
_GROUP = 16
# The kernel has room for one row of x if it is no longer.
_MOST_IN_SIZE = 2**18


class _Shape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("num_rows", "in_size", "out_size", "x_stride", "is_gated")
    )


class PanelProduct:
    """A weight, `[out_size, in_size]`, in panels of columns of the result, and perhaps a bias.

    Every sum is taken in the same order, so that a row of the result does not depend on which
    rows are with it, nor on the number of threads. The weight is copied, the bias is kept.
    """

    def __init__(
        self, kernel: ctypes._NamedFuncPointer, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self._kernel = kernel
        self._out_size, self._in_size = weight.shape
        self._panels = _panels_of(weight)
        self._bias = bias
        self._panels_address = self._panels.data_ptr()
        self._bias_address = None if bias is None else bias.data_ptr()

    @classmethod
    def make(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Self | None:
        """Return the product, or None where it does not serve or is not to be had."""
        is_served = (
            weight.device.type == "cpu"
            and weight.dtype in _SUFFIXES
            and weight.numel() > 0
            and weight.shape[1] <= _MOST_IN_SIZE
            and (bias is None or bias.is_contiguous())
            and (bias is None or (bias.dtype == weight.dtype and len(bias) == len(weight)))
        )
        library = _library() if is_served else None
        if library is None:
            return None
        kernel = library[f"panel_product_{_SUFFIXES[weight.dtype]}"]
        kernel.argtypes = [ctypes.c_void_p] * 5
        kernel.restype = None
        return cls(kernel, weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, out_size]` for `[num_rows, in_size]`, whose rows may lie apart."""
        return self._product(x, self._out_size, is_gated=0)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Return `silu(first half of the product) * second half`, `[num_rows, out_size / 2]`."""
        half = self._out_size // 2
        if half % _PANEL == 0:
            return self._product(x, half, is_gated=1)
        gate, other = self(x).chunk(2, dim=1)
        return functional.silu(gate).mul_(other)

    def _product(self, x: torch.Tensor, out_size: int, *, is_gated: int) -> torch.Tensor:
        num_rows, in_size = x.shape
        assert x.dtype == self._panels.dtype
        assert in_size == self._in_size
        assert x.stride(1) == 1
        out = x.new_empty((num_rows, out_size))
        shape = _Shape(num_rows, in_size, out_size, x.stride(0), is_gated)
        self._kernel(
            ctypes.addressof(shape),
            x.data_ptr(),
            self._panels_address,
            self._bias_address,
            out.data_ptr(),
        )
        return out


def _panels_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight as `[num_panels, num_steps, _PANEL, _STEP]`, padded with zeros."""
    step = _STEP[weight.dtype]
    out_size, in_size = weight.shape
    padded = functional.pad(weight, (0, -in_size % (_GROUP * step), 0, -out_size % _PANEL))
    panels = padded.reshape(-1, _PANEL, padded.shape[1] // step, step).transpose(1, 2)
    # A weight that is one panel of one step is laid out so already, and must still be copied.
    return panels.clone(memory_format=torch.contiguous_format)


@cache
def _library() -> ctypes.CDLL | None:
    return load_kernels(Path(__file__).with_suffix(".c"))
