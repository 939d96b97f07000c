"""Tokens drawn from rows of float32 or bfloat16 scores on the CPU."""

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

__all__ = ["Draw"]


class Draw:
    """Finds the highest sums of scores and noise, as `workers.sampling.choice` defines them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._maxima, self._token = library.drawn_maxima, library.drawn_token
        self._maxima.argtypes = [
            *(address, number, number, number, address, number),
            *(address, address, number, address),
        ]
        self._maxima.restype = None
        self._token.argtypes = [address, address, number, ctypes.c_float, number]
        self._token.restype = number

    @classmethod
    def make(cls) -> Self | None:
        """Return the kernels, or None if they are not available."""
        library = _library()
        return None if library is None else cls(library)

    def __call__(
        self,
        scores: torch.Tensor,
        rows: npt.NDArray[np.int64],
        scales: npt.NDArray[np.float32],
        keys: npt.NDArray[np.int64],
        first_id: int,
    ) -> torch.Tensor:
        """Return the local maximum of each of these rows with noise, int64 `[num_rows]`.

        `scores` is `[num_scores, size]`, float32 or bfloat16, with contiguous rows, of the tokens
        from `first_id` on. `scales`, `keys`: `[num_rows]`, 1 / temperature and keys of the noise.
        """
        maxima = torch.empty(len(rows), dtype=torch.int64)
        self._maxima(
            scores.data_ptr(),
            scores.stride(0),
            scores.shape[1],
            scores.dtype == torch.bfloat16,
            rows.ctypes.data,
            len(rows),
            scales.ctypes.data,
            keys.ctypes.data,
            first_id,
            maxima.data_ptr(),
        )
        return maxima

    def token(
        self, scores: npt.NDArray[np.float32], ids: npt.NDArray[np.uint32], scale: float, key: int
    ) -> int:
        """Return the token drawn from tokens of a row, or -1 if they are broken."""
        token_id: int = self._token(scores.ctypes.data, ids.ctypes.data, len(ids), scale, key)
        return token_id


@cache
def _library() -> ctypes.CDLL | None:
    return load_kernels(Path(__file__).with_suffix(".c"))
