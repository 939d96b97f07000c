"""Kernels of attention over the paged cache, with their layer and step parameters."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    from attention.params import AttentionParams, AttentionSpec

__all__ = ["PagedKernel", "kernel_suffix"]

_MAX_BLOCK_SIZE = 256
_MAX_HEAD_SIZE = 256
_SUFFIXES = {torch.float32: "float", torch.bfloat16: "bfloat"}
# As in paged_shape.h; 0 stands for the model's dtype.
_FORMATS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}


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
            block_stride=2 * spec.num_cache_layers * block_elements,
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
