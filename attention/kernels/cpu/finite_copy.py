"""Copies weights on the CPU, and checks at the same time whether they are finite."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from attention.kernels.cpu.native import load_kernels

__all__ = ["are_finite", "copy_finite"]

_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_KERNELS = {
    (torch.bfloat16, torch.bfloat16): "copy_finite_16",
    (torch.float16, torch.float16): "copy_finite_16",
    (torch.float32, torch.float32): "copy_finite_32",
    (torch.bfloat16, torch.float32): "copy_finite_bfloat_float",
}
_CHECKS = {
    torch.bfloat16: "are_finite_16",
    torch.float16: "are_finite_16",
    torch.float32: "are_finite_32",
}
_EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}


def copy_finite(target: torch.Tensor, source: torch.Tensor) -> bool | None:
    """Write `source` to `target` and return whether all values are finite.

    Returns None, and writes nothing, if there is no kernel for these tensors.
    """
    if source.device.type != "cpu" or target.device.type != "cpu":
        return None
    if source.is_contiguous() and target.is_contiguous():
        source, target = source.view(1, -1), target.view(1, -1)
    if source.dim() != 2 or source.stride(1) != 1 or target.stride(1) != 1:
        return None
    kernel = _kernel(source.dtype, target.dtype)
    if kernel is None:
        return None
    return bool(
        kernel(
            source.data_ptr(),
            source.stride(0),
            target.data_ptr(),
            target.stride(0),
            *source.shape,
            _EXPONENTS[source.dtype],
        )
    )


def are_finite(values: torch.Tensor) -> bool | None:
    """Return whether all values are finite, or None if there is no kernel for this tensor."""
    if values.device.type != "cpu" or not values.is_contiguous():
        return None
    kernel = _check(values.dtype)
    if kernel is None:
        return None
    return bool(kernel(values.data_ptr(), values.numel(), _EXPONENTS[values.dtype]))


@cache
def _check(dtype: torch.dtype) -> ctypes._NamedFuncPointer | None:
    name = _CHECKS.get(dtype)
    library = None if name is None else _library()
    if library is None or name is None:
        return None
    kernel = library[name]
    kernel.argtypes = [_ADDRESS, _NUMBER, ctypes.c_uint32]
    kernel.restype = _NUMBER
    return kernel


@cache
def _kernel(source: torch.dtype, target: torch.dtype) -> ctypes._NamedFuncPointer | None:
    name = _KERNELS.get((source, target))
    library = None if name is None else _library()
    if library is None or name is None:
        return None
    kernel = library[name]
    kernel.argtypes = [*(_ADDRESS, _NUMBER, _ADDRESS, _NUMBER, _NUMBER, _NUMBER), ctypes.c_uint32]
    kernel.restype = _NUMBER
    return kernel


@cache
def _library() -> ctypes.CDLL | None:
    return load_kernels(Path(__file__).with_suffix(".c"))
