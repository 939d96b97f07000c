"""Decode attention on the CPU, reading the paged cache in place."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from attention.kernels.cpu.native import load_kernels
from attention.kernels.cpu.paged_kernel import PagedKernel, kernel_suffix

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from attention.params import AttentionParams, AttentionSpec

__all__ = ["DecodeBatch", "PagedDecode"]


class DecodeBatch:
    """The decodes of one step: the block table and the number of keys of each sequence."""

    __slots__ = ("first_token", "num_keys", "num_keys_address", "tables", "tables_address")

    def __init__(
        self, first_token: int, tables: npt.NDArray[np.int32], num_keys: npt.NDArray[np.int32]
    ) -> None:
        self.first_token = first_token
        """The token of the first decode; the others follow it."""
        self.tables = np.ascontiguousarray(tables)
        self.num_keys = np.ascontiguousarray(num_keys)
        # Asking an array for its address takes longer than the kernel takes for a short sequence.
        self.tables_address = self.tables.ctypes.data
        self.num_keys_address = self.num_keys.ctypes.data


class PagedDecode(PagedKernel):
    """The kernel of layers with equal parameters."""

    @classmethod
    def make(cls, params: AttentionParams, spec: AttentionSpec) -> Self | None:
        """Return the kernel, or None if it does not support the layers or is not available."""
        suffix = kernel_suffix(params, spec)
        library = None if suffix is None else _library()
        if library is None:
            return None
        kernel = library[f"paged_decode_{suffix}"]
        kernel.argtypes = [ctypes.c_void_p] * 8
        kernel.restype = None
        return cls(kernel, params, spec)

    def run_decodes(
        self,
        batch: DecodeBatch,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        place: int,
        out: torch.Tensor,
        *,
        scales: tuple[float, float],
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attend for the decodes of a step.

        `query` and `out` are `[num_tokens, num_heads * head_size]`, of all tokens of the step, and
        may be strided. `place` is the layer's on the layer axis of the cache, and `scales` are the
        factors of its fp8 keys and values. `sinks` is `[num_heads]` float32, or None.
        """
        self._set_step(batch.tables, query, out, scales)
        first = batch.first_token * query.itemsize
        self._kernel(
            self._shape_address,
            query.data_ptr() + first * query.stride(0),
            kv_cache.data_ptr() + place * self._layer_bytes,
            batch.tables_address,
            batch.num_keys_address,
            self._slopes_address,
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr() + first * out.stride(0),
        )


@cache
def _library() -> ctypes.CDLL | None:
    return load_kernels(Path(__file__).with_suffix(".c"))
