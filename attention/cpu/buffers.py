"""Buffers of torch_sdpa on a CPU: arrays, scratch and views of the cache.

Large tensors are not allocated per step: glibc would map pages for each of them, and the page
faults take longer than the attention.
"""

import weakref
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from attention.params import AttentionSpec, storage_dtype

__all__ = ["CacheViews", "LayerViews", "Scratch", "StepArrays"]

# Elements; aligns every array for any kernel.
_ALIGNMENT = 16

_Array = npt.NDArray[Any]  # Any: of the dtype that its StepArrays has


class _Chunk:
    """Memory that a numpy array and a tensor share."""

    def __init__(self, capacity: int, dtype: torch.dtype) -> None:
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._tensor = torch.empty(capacity, dtype=dtype)
        self._array: _Array = self._tensor.numpy()
        self.capacity = capacity
        self.used = 0

    def allocate(self, size: int) -> tuple[_Array, torch.Tensor]:
        start = self.used
        self.used = start + -(-size // _ALIGNMENT) * _ALIGNMENT
        return self._array[start : start + size], self._tensor[start : start + size]


class StepArrays:
    """Arrays of a step, filled by numpy and read by torch; reused by the next step."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._chunks = [_Chunk(4096, dtype)]

    def reset(self) -> None:
        """Free all arrays for the next step."""
        if len(self._chunks) > 1:
            self._chunks = [_Chunk(sum(chunk.capacity for chunk in self._chunks), self._dtype)]
        self._chunks[0].used = 0

    def allocate(self, *shape: int) -> tuple[_Array, torch.Tensor]:
        """Return an array to fill and a tensor of the same memory, valid until the next reset."""
        size = 1
        for length in shape:
            size *= length
        last = self._chunks[-1]
        if last.used + size > last.capacity - _ALIGNMENT:
            last = _Chunk(2 * last.capacity + size, self._dtype)
            self._chunks.append(last)
        array, tensor = last.allocate(size)
        return (array, tensor) if len(shape) == 1 else (array.reshape(shape), tensor.view(shape))


class Scratch:
    """One tensor that every gather reuses, so that it stays in the CPU's cache."""

    def __init__(self, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):
            self._flat = torch.empty(0, dtype=dtype)

    def allocate(self, size: int) -> torch.Tensor:
        """Return the first `size` elements, which all earlier results share."""
        if self._flat.numel() < size:
            with torch.inference_mode(False):
                self._flat = self._flat.new_empty(1 << (size - 1).bit_length())
        return self._flat[:size]


class LayerViews(NamedTuple):
    """One layer's cache as matrices, offset so that all layers have the same indices."""

    blocks: torch.Tensor
    """Row `2 * num_cache_layers * b` holds the keys of block `b`, the row after it the values."""
    keys: torch.Tensor
    """Row `2 * num_cache_layers * block_size * b + i` is the key of slot `i` of block `b`."""
    values: torch.Tensor
    """Like `keys`."""


class CacheViews:
    """The views of every layer of the cache that was used last."""

    def __init__(self, spec: AttentionSpec) -> None:
        params = spec.layers[0]
        self._dtype = storage_dtype(spec.cache_dtype)
        self._shape = (
            spec.num_cache_layers,
            2,
            spec.block_size,
            params.num_kv_heads,
            params.head_size,
        )
        self._layers: list[LayerViews] = []
        self._owner: weakref.ref[torch.Tensor] | None = None

    def views_of(self, kv_cache: torch.Tensor) -> list[LayerViews]:
        """Return the views of each place on the layer axis; they do not keep the cache alive."""
        if self._owner is None or self._owner() is not kv_cache:
            self._layers = self._make_views(kv_cache)
            self._owner = weakref.ref(kv_cache, self._forget)
        return self._layers

    def _forget(self, _: object) -> None:
        self._layers = []
        self._owner = None

    def _make_views(self, kv_cache: torch.Tensor) -> list[LayerViews]:
        if tuple(kv_cache.shape[1:]) != self._shape or kv_cache.dtype != self._dtype:
            raise ValueError(
                f"The cache is {tuple(kv_cache.shape)} {kv_cache.dtype}, "
                f"but must be (num_blocks, {', '.join(map(str, self._shape))}) {self._dtype}."
            )
        num_layers, _, block_size, num_kv_heads, head_size = self._shape
        slot_size = num_kv_heads * head_size
        # Views of `data` share the storage but do not keep the tensor object alive.
        blocks = kv_cache.data.view(-1, block_size * slot_size)
        slots = kv_cache.data.view(-1, slot_size)
        return [
            LayerViews(
                blocks=blocks[2 * layer :],
                keys=slots[2 * layer * block_size :],
                values=slots[(2 * layer + 1) * block_size :],
            )
            for layer in range(num_layers)
        ]
