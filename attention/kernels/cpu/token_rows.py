"""Norms, rotary embeddings and gates of token rows on the CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Self

import torch
from torch.nn import functional

from attention.kernels.cpu.native import load_kernels

__all__ = ["AddNorm", "Gate", "Rotate"]

_SUFFIXES = {torch.float32: "float", torch.bfloat16: "bfloat"}
_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class AddNorm:
    """Adds to rows in place, and returns their root-mean-square norm."""

    def __init__(self, kernel: ctypes._NamedFuncPointer, weight: torch.Tensor, eps: float) -> None:
        self._kernel = kernel
        self._weight = weight
        self._weight_address = weight.data_ptr()
        self._size = len(weight)
        self._eps = eps

    @classmethod
    def make(cls, weight: torch.Tensor, eps: float) -> Self | None:
        """Return the kernel for a norm's weight, or None if it is not available."""
        kernel = _kernel("add_norm", weight.dtype, weight.device)
        if kernel is None:
            return None
        kernel.argtypes = [
            *(_ADDRESS, _NUMBER) * 2,
            *[_ADDRESS] * 2,
            *[_NUMBER] * 2,
            ctypes.c_float,
        ]
        return cls(kernel, weight, eps)

    def __call__(self, stream: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Return the norm of `stream + delta`, `[num_rows, size]`; `stream` becomes that sum."""
        num_rows = stream.shape[0]
        out = stream.new_empty((num_rows, self._size))
        self._kernel(
            stream.data_ptr(),
            stream.stride(0),
            None if delta is None else delta.data_ptr(),
            0 if delta is None else delta.stride(0),
            self._weight_address,
            out.data_ptr(),
            num_rows,
            self._size,
            self._eps,
        )
        return out


class Gate:
    """Applies SiLU to one half of the columns, and multiplies by the other."""

    def __init__(self, kernels: dict[torch.dtype, ctypes._NamedFuncPointer]) -> None:
        self._kernels = kernels

    @classmethod
    def make(cls, device: torch.device) -> Self | None:
        """Return the kernel of float32 and bfloat16, or None if it is not available."""
        kernels = {}
        for dtype in _SUFFIXES:
            kernel = _kernel("gate", dtype, device)
            if kernel is None:
                return None
            kernel.argtypes = [_ADDRESS, _NUMBER, _ADDRESS, _NUMBER, _NUMBER]
            kernels[dtype] = kernel
        return cls(kernels)

    def __call__(self, columns: torch.Tensor) -> torch.Tensor:
        """Return `silu(first half) * second half`, `[num_rows, num_columns / 2]`.

        Torch computes dtypes that the kernel does not support.
        """
        kernel = self._kernels.get(columns.dtype)
        if kernel is None:
            gate, up = columns.chunk(2, dim=1)
            return functional.silu(gate).mul_(up)
        num_rows, num_columns = columns.shape
        size = num_columns // 2
        out = columns.new_empty((num_rows, size))
        kernel(columns.data_ptr(), columns.stride(0), out.data_ptr(), num_rows, size)
        return out


class Rotate:
    """Applies rotary embeddings to heads in place."""

    def __init__(self, kernel: ctypes._NamedFuncPointer, table: torch.Tensor) -> None:
        self._kernel = kernel
        self._table = table
        self._table_address = table.data_ptr()
        self._head_size = table.shape[1]

    @classmethod
    def make(cls, table: torch.Tensor, dtype: torch.dtype) -> Self | None:
        """Return the kernel, or None if it is not available.

        `table` is `[num_positions, head_size]` float32: cosines, then sines, of each pair.
        """
        kernel = _kernel("rotate", dtype, table.device)
        if kernel is None:
            return None
        kernel.argtypes = [_ADDRESS, _NUMBER, _ADDRESS, _ADDRESS, _NUMBER, _NUMBER, _NUMBER]
        return cls(kernel, table)

    def __call__(self, rows: torch.Tensor, positions: torch.Tensor, num_heads: int) -> None:
        """Rotate the first `num_heads` heads of each row; `positions` is `[num_rows]` int64."""
        self._kernel(
            rows.data_ptr(),
            rows.stride(0),
            positions.data_ptr(),
            self._table_address,
            rows.shape[0],
            num_heads,
            self._head_size,
        )


def _kernel(name: str, dtype: torch.dtype, device: torch.device) -> ctypes._NamedFuncPointer | None:
    library = _library() if device.type == "cpu" and dtype in _SUFFIXES else None
    if library is None:
        return None
    kernel = library[f"{name}_{_SUFFIXES[dtype]}"]
    kernel.restype = None
    return kernel


@cache
def _library() -> ctypes.CDLL | None:
    return load_kernels(Path(__file__).with_suffix(".c"))
