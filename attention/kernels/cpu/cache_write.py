"""Writes keys and values to the paged cache on the CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

from attention.kernels.cpu.native import load_kernels

if TYPE_CHECKING:
    import torch

__all__ = ["CacheWrite"]


class CacheWrite:
    """Writes the keys and values of a step's tokens to their slots, for one layer."""

    def __init__(self, kernel: ctypes._NamedFuncPointer) -> None:
        self._kernel = kernel

    @classmethod
    def make(cls) -> Self | None:
        """Return the kernel, or None if it is not available."""
        library = _library()
        if library is None:
            return None
        kernel = library.cache_write
        address, number = ctypes.c_void_p, ctypes.c_int64
        kernel.argtypes = [*(address, number) * 3, number, address, address]
        kernel.restype = None
        return cls(kernel)

    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        cached_keys: torch.Tensor,
        cached_values: torch.Tensor,
    ) -> None:
        """Copy row i of `key` and `value` to row `slots[i]` of the cache.

        All have the same dtype and contiguous rows of the same length; rows of the cache follow
        each other. `slots` is int64 `[num_tokens]` within the cache; `key` and `value` may have
        more rows.
        """
        size = key.itemsize
        self._kernel(
            key.data_ptr(),
            key.stride(0) * size,
            value.data_ptr(),
            value.stride(0) * size,
            slots.data_ptr(),
            slots.shape[0],
            key.shape[1] * size,
            cached_keys.data_ptr(),
            cached_values.data_ptr(),
        )


@cache
def _library() -> ctypes.CDLL | None:
    return load_kernels(Path(__file__).with_suffix(".c"))
