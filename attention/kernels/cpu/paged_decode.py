"""Decode attention on the CPU, reading the paged cache in place."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from attention.kernels.cpu.native import load_kernels

if TYPE_CHECKING:
    import numpy.typing as npt

    from attention.params import AttentionParams, AttentionSpec

__all__ = ["DecodeBatch", "PagedDecode"]

_MAX_BLOCK_SIZE = 256
_MAX_HEAD_SIZE = 256
_SUFFIXES = {torch.float32: "float", torch.bfloat16: "bfloat"}
# As in paged_decode.c; 0 stands for the model's dtype.
_FORMATS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}


class _DecodeShape(ctypes.Structure):
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


class PagedDecode:
    """The kernel of layers with equal parameters."""

    def __init__(
        self, kernel: ctypes._NamedFuncPointer, params: AttentionParams, spec: AttentionSpec
    ) -> None:
        block_elements = spec.block_size * params.num_kv_heads * params.head_size
        self._kernel = kernel
        self._item_size = spec.dtype.itemsize
        self._layer_bytes = 2 * block_elements * spec.cache_dtype.itemsize
        self._scale = params.scale
        self._is_fp8 = spec.cache_dtype in _FORMATS
        self._shape = _DecodeShape(
            num_heads=params.num_heads,
            num_kv_heads=params.num_kv_heads,
            head_size=params.head_size,
            block_size=spec.block_size,
            block_stride=2 * spec.num_cache_layers * block_elements,
            value_offset=block_elements,
            window=params.sliding_window or 0,
            format=_FORMATS.get(spec.cache_dtype, 0),
            scale=params.scale,
            value_scale=1.0,
            soft_cap=params.soft_cap or 0.0,
        )
        self._shape_address = ctypes.addressof(self._shape)
        slopes = params.alibi_slopes
        self._slopes = None if slopes is None else np.asarray(slopes, dtype=np.float32)
        self._slopes_address = None if self._slopes is None else self._slopes.ctypes.data

    @classmethod
    def make(cls, params: AttentionParams, spec: AttentionSpec) -> Self | None:
        """Return the kernel, or None if it does not support the layers or is not available."""
        is_supported = (
            spec.device.type == "cpu"
            and params.is_cached
            and spec.dtype in _SUFFIXES
            and (spec.cache_dtype == spec.dtype or spec.cache_dtype in _FORMATS)
            and spec.block_size <= _MAX_BLOCK_SIZE
            and params.head_size <= _MAX_HEAD_SIZE
        )
        library = _library() if is_supported else None
        if library is None:
            return None
        kernel = library[f"paged_decode_{_SUFFIXES[spec.dtype]}"]
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
        shape, item_size = self._shape, self._item_size
        if self._is_fp8:
            shape.scale, shape.value_scale = self._scale * scales[0], scales[1]
        shape.num_sequences, shape.table_stride = batch.tables.shape
        shape.query_stride, shape.out_stride = query.stride(0), out.stride(0)
        self._kernel(
            self._shape_address,
            query.data_ptr() + batch.first_token * shape.query_stride * item_size,
            kv_cache.data_ptr() + place * self._layer_bytes,
            batch.tables_address,
            batch.num_keys_address,
            self._slopes_address,
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr() + batch.first_token * shape.out_stride * item_size,
        )


@cache
def _library() -> ctypes.CDLL | None:
    return load_kernels(Path(__file__).with_suffix(".c"))
