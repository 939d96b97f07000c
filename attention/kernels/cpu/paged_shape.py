"""What kernels of attention over the paged cache know of layers and steps."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attention.params import AttentionParams, AttentionSpec

__all__ = ["PagedShape", "kernel_suffix", "layer_bytes"]

_MAX_BLOCK_SIZE = 256
_MAX_HEAD_SIZE = 256
_SUFFIXES = {torch.float32: "float", torch.bfloat16: "bfloat"}
# As in paged_shape.h; 0 stands for the model's dtype.
_FORMATS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}


class PagedShape(ctypes.Structure):
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
    def of_layer(cls, params: AttentionParams, spec: AttentionSpec) -> PagedShape:
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

    def set_scales(self, scale: float, scales: tuple[float, float]) -> None:
        """Set the factors of fp8 keys and values; `scale` is that of scores."""
        if self.format:
            self.scale, self.value_scale = scale * scales[0], scales[1]


def layer_bytes(params: AttentionParams, spec: AttentionSpec) -> int:
    """Return the bytes of a layer's keys and values in a block."""
    return 2 * _block_elements(params, spec) * spec.cache_dtype.itemsize


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
