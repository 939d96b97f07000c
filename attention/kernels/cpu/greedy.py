"""The most likely tokens of rows of bfloat16 scores on the CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from attention.kernels.cpu.native import load_kernels

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Greedy"]


class Greedy:
    """Finds the most likely tokens of rows. NumPy has no bfloat16, so it would convert them."""

    def __init__(self, kernel: ctypes._NamedFuncPointer) -> None:
        self._kernel = kernel

    @classmethod
    def make(cls) -> Self | None:
        """Return the kernel, or None if it is not available."""
        library = _library()
        if library is None:
            return None
        kernel = library.greedy
        address, number = ctypes.c_void_p, ctypes.c_int64
        kernel.argtypes = [address, number, number, address, number, address]
        kernel.restype = None
        return cls(kernel)

    def __call__(self, scores: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the first of the highest scores of each of these rows, int64 `[num_rows]`.

        `scores` is `[num_scores, size]`, bfloat16, with contiguous rows. A row with NaN or
        infinity, or with nothing but -infinity, gives -1.
        """
        tokens = torch.empty(len(rows), dtype=torch.int64)
        self._kernel(
            scores.data_ptr(),
            scores.stride(0),
            scores.shape[1],
            rows.ctypes.data,
            len(rows),
            tokens.data_ptr(),
        )
        return tokens


@cache
def _library() -> ctypes.CDLL | None:
    return load_kernels(Path(__file__).with_suffix(".c"))
