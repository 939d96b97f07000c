"""Attention of prompts on the CPU, reading the paged cache in place."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from attention.kernels.cpu.amx import has_amx
from attention.kernels.cpu.native import find_kernel, load_kernels
from attention.kernels.cpu.paged_kernel import PagedKernel, kernel_suffix
from attention.params import AttentionType

if TYPE_CHECKING:
    import numpy.typing as npt

    from attention.params import AttentionParams, AttentionSpec

__all__ = ["PagedPrefill", "PrefillBatch"]

_SOURCE, _AMX_SOURCE = "paged_prefill.c", "paged_prefill_amx.c"
# Queries times the heads that share a KV head, per work item. A work item reads its keys once,
# which takes more of the time with AMX.
_ROWS_AT_ONCE, _ROWS_AT_ONCE_WITH_AMX = 64, 128


class PrefillBatch:
    """The prefills of one step: their tokens, and the block table and keys of each sequence."""

    __slots__ = ("addresses", "arrays", "max_queries", "num_items", "tables")

    def __init__(
        self,
        starts: npt.NDArray[np.int64],
        query_lens: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
        *,
        max_queries: int,
    ) -> None:
        """`starts` are the tokens of the first queries. A work item has up to `max_queries`."""
        self.max_queries = max_queries
        self.tables = np.ascontiguousarray(tables)
        items = _items(query_lens, seq_lens, max_queries)
        self.num_items = len(items)
        self.arrays = [
            self.tables,
            np.ascontiguousarray(seq_lens),
            np.ascontiguousarray(query_lens),
            starts.astype(np.int32),
            items,
        ]
        # Asking an array for its address takes a microsecond.
        self.addresses = [array.ctypes.data for array in self.arrays]


class PagedPrefill(PagedKernel):
    """The kernel of layers with equal parameters."""

    def __init__(
        self,
        kernel: ctypes._NamedFuncPointer,
        params: AttentionParams,
        spec: AttentionSpec,
        *,
        rows_at_once: int,
    ) -> None:
        super().__init__(kernel, params, spec)
        self.max_queries = max(1, rows_at_once // params.num_queries_per_kv)
        """Queries of a work item."""

    @classmethod
    def make(cls, params: AttentionParams, spec: AttentionSpec) -> Self | None:
        """Return the kernel, or None if it does not support the layers or is not available.

        It needs causal layers and AVX2.
        """
        is_causal = params.attention_type is AttentionType.DECODER
        suffix = kernel_suffix(params, spec) if is_causal else None
        if suffix is None:
            return None
        uses_amx = spec.dtype == torch.bfloat16 and has_amx()
        libraries = map(_library, [_AMX_SOURCE, _SOURCE] if uses_amx else [_SOURCE])
        kernel = find_kernel(f"paged_prefill_{suffix}", libraries)
        if kernel is None:
            return None
        address, number = ctypes.c_void_p, ctypes.c_int64
        kernel.argtypes = [*[address] * 8, number, number, *[address] * 3]
        kernel.restype = ctypes.c_int
        rows_at_once = _ROWS_AT_ONCE_WITH_AMX if uses_amx else _ROWS_AT_ONCE
        return cls(kernel, params, spec, rows_at_once=rows_at_once)

    def run_prefills(
        self,
        batch: PrefillBatch,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        place: int,
        out: torch.Tensor,
        *,
        scales: tuple[float, float],
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attend for the prefills of a step, after their keys and values have been written.

        Takes the arguments of `PagedDecode.run_decodes`. Raises MemoryError.
        """
        self._set_step(batch.tables, query, out, scales)
        failed = self._kernel(
            self._shape_address,
            query.data_ptr(),
            kv_cache.data_ptr() + place * self._layer_bytes,
            *batch.addresses,
            batch.num_items,
            batch.max_queries,
            self._slopes_address,
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
        )
        if failed:
            raise MemoryError("No memory for the attention of a prompt.")


def _items(
    query_lens: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32], max_queries: int
) -> npt.NDArray[np.int32]:
    """Return the sequence and the first query of each work item, `[num_items, 2]`.

    Items with the most keys are first, so that threads end at about the same time.
    """
    counts = -(-query_lens // max_queries)
    sequences = np.repeat(np.arange(len(counts)), counts)
    firsts = np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts *= max_queries
    num_keys = (seq_lens - query_lens)[sequences] + firsts
    order = np.argsort(-num_keys, kind="stable")
    return np.stack((sequences, firsts), axis=1)[order].astype(np.int32)


@cache
def _library(source: str) -> ctypes.CDLL | None:
    return load_kernels(Path(__file__).with_name(source))
