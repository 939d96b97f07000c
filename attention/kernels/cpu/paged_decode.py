"""Decode attention on the CPU, reading the paged cache in place."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from attention.kernels.cpu.instruction_set import has_amx
from attention.kernels.cpu.native import find_kernel, load_kernels
from attention.params import AttentionParams, AttentionSpec, AttentionType

if TYPE_CHECKING:
    import numpy.typing as npt


__all__ = ["DecodeBatch", "PagedDecode", "PagedPrefill", "PrefillBatch"]

_MAX_BLOCK_SIZE = 256
_MAX_HEAD_SIZE = 256
_SUFFIXES = {torch.float32: "float", torch.bfloat16: "bfloat"}
# As in paged_shape.h; 0 stands for the model's dtype.
_FORMATS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}

_SOURCE, _AMX_SOURCE = "paged_prefill.c", "paged_prefill_amx.c"
# Queries times the heads that share a KV head, per work item. A work item reads its keys once,
# which takes more of the time with AMX.
_ROWS_AT_ONCE, _ROWS_AT_ONCE_WITH_AMX = 64, 128


class _PagedShape(ctypes.Structure):
    """`Shape` of paged_shape.h. The fields that depend on the step are zero at first."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "num_sequences",
                "num_heads",
                "num_kv_heads",
                "head_size",
                "block_size",
                "block_stride",
                "value_offset",
                "table_stride",
                "query_stride",
                "out_stride",
                "window",
                "format",
            )
        ),
        ("scale", ctypes.c_float),
        ("value_scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )

    @classmethod
    def of_layer(cls, params: AttentionParams, spec: AttentionSpec) -> _PagedShape:
        """Return the shape of a layer with a cache."""
        block_elements = _block_elements(params, spec)
        return cls(
            num_heads=params.num_heads,
            num_kv_heads=params.num_kv_heads,
            head_size=params.head_size,
            block_size=spec.block_size,
            block_stride=spec.block_elements,
            value_offset=block_elements,
            window=params.sliding_window or 0,
            format=_FORMATS.get(spec.cache_dtype, 0),
            scale=params.scale,
            value_scale=1.0,
            soft_cap=params.soft_cap or 0.0,
        )


class PagedKernel:
    """A kernel of attention over the paged cache, for layers with equal parameters."""

    def __init__(
        self, kernel: ctypes._NamedFuncPointer, params: AttentionParams, spec: AttentionSpec
    ) -> None:
        self._kernel = kernel
        self._scale = params.scale
        self._shape = _PagedShape.of_layer(params, spec)
        self._shape_address = ctypes.addressof(self._shape)
        self._layer_bytes = 2 * _block_elements(params, spec) * spec.cache_dtype.itemsize
        slopes = params.alibi_slopes
        self._slopes = None if slopes is None else np.asarray(slopes, dtype=np.float32)
        self._slopes_address = None if self._slopes is None else self._slopes.ctypes.data

    def _set_step(
        self,
        tables: npt.NDArray[np.int32],
        query: torch.Tensor,
        out: torch.Tensor,
        scales: tuple[float, float],
    ) -> None:
        """Set the parameters of the step. `scales` are the factors of fp8 keys and values."""
        shape = self._shape
        if shape.format:
            shape.scale, shape.value_scale = self._scale * scales[0], scales[1]
        shape.num_sequences, shape.table_stride = tables.shape
        shape.query_stride, shape.out_stride = query.stride(0), out.stride(0)


def kernel_suffix(params: AttentionParams, spec: AttentionSpec) -> str | None:
    """Return the end of the names of kernels for a layer, or None if they do not support it."""
    is_supported = (
        spec.device.type == "cpu"
        and params.is_cached
        and (spec.cache_dtype == spec.dtype or spec.cache_dtype in _FORMATS)
        and spec.block_size <= _MAX_BLOCK_SIZE
        and params.head_size <= _MAX_HEAD_SIZE
    )
    return _SUFFIXES.get(spec.dtype) if is_supported else None


def _block_elements(params: AttentionParams, spec: AttentionSpec) -> int:
    return spec.block_size * params.num_kv_heads * params.head_size


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
        libraries = map(_prefill_library, [_AMX_SOURCE, _SOURCE] if uses_amx else [_SOURCE])
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
def _prefill_library(source: str) -> ctypes.CDLL | None:
    return load_kernels(Path(__file__).with_name(source))
