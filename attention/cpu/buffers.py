"""Buffers of torch_sdpa on a CPU: arrays, scratch and views of the cache.

Large tensors are not allocated per step: glibc would map pages for each of them, and the page
faults take longer than the attention.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.batch import AttentionBatch, EncoderBatch
from attention.kernels.cpu.cache_write import CacheWrite
from attention.params import AttentionSpec, storage_dtype

__all__ = ["CacheViews", "LayerViews", "Scratch", "StepArrays", "WritePlan", "plan_write"]

# Elements; aligns every array for any kernel.
_ALIGNMENT = 16
_Array = npt.NDArray[Any]  # Any: of the dtype that its StepArrays has

_Ints = npt.NDArray[np.int64]
_Batch = AttentionBatch | EncoderBatch


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
    """One layer's cache as matrices, offset so that all layers of a shape have the same indices.

    A block has `parts_per_block` rows of `blocks`, the keys and the values of each layer.
    """

    blocks: torch.Tensor
    """Row `parts_per_block * b` holds the keys of block `b`, the row after it the values."""
    keys: torch.Tensor
    """Row `parts_per_block * block_size * b + i` is the key of slot `i` of block `b`."""
    values: torch.Tensor
    """Like `keys`."""


class CacheViews:
    """The views of every layer of the cache that was used last."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._dtype = storage_dtype(spec.cache_dtype)
        self._shape = spec.block_shape
        self._layers: list[LayerViews | None] = []
        self._owner: weakref.ref[torch.Tensor] | None = None

    def views_of(self, kv_cache: torch.Tensor) -> list[LayerViews | None]:
        """Return the views of each cached layer; they do not keep the cache alive."""
        if self._owner is None or self._owner() is not kv_cache:
            self._layers = self._make_views(kv_cache)
            self._owner = weakref.ref(kv_cache, self._forget)
        return self._layers

    def _forget(self, _: object) -> None:
        self._layers = []
        self._owner = None

    def _make_views(self, kv_cache: torch.Tensor) -> list[LayerViews | None]:
        if tuple(kv_cache.shape[1:]) != self._shape or kv_cache.dtype != self._dtype:
            raise ValueError(
                f"The cache is {tuple(kv_cache.shape)} {kv_cache.dtype}, "
                f"but must be (num_blocks, {', '.join(map(str, self._shape))}) {self._dtype}."
            )
        places = self._spec.cache_layers
        return [
            None if place is None else self._layer_views(kv_cache, layer_index, place)
            for layer_index, place in enumerate(places)
        ]

    def _layer_views(self, kv_cache: torch.Tensor, layer_index: int, place: int) -> LayerViews:
        layer, block_size = self._spec.layers[layer_index], self._spec.block_size
        slot_size = layer.num_kv_heads * layer.head_size
        # Views of `data` share the storage but do not keep the tensor object alive.
        blocks = kv_cache.data.view(-1, block_size * slot_size)
        slots = kv_cache.data.view(-1, slot_size)
        return LayerViews(
            blocks=blocks[2 * place :],
            keys=slots[2 * place * block_size :],
            values=slots[(2 * place + 1) * block_size :],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WritePlan:
    """Where a step writes keys and values; the same for all layers."""

    num_tokens: int
    tokens: torch.Tensor | None
    """The tokens that are written; None for the first `num_tokens`."""
    slots: torch.Tensor
    """Indices into `LayerViews.keys` and `LayerViews.values`."""
    stale_blocks: torch.Tensor | None
    """Indices into `LayerViews.blocks` of blocks that the step begins but does not fill."""
    kernel: CacheWrite | None
    """Kernel that writes the first tokens; None for torch."""

    def write_layer(
        self, key: torch.Tensor | None, value: torch.Tensor | None, views: LayerViews
    ) -> None:
        """Write one layer's keys and values, `[num_tokens, num_kv_heads * head_size]`, if any."""
        if not self.num_tokens or key is None or value is None:
            return
        if self.stale_blocks is not None:
            # A masked slot takes part in matrix products, where a stale value that is not finite
            # would give NaN.
            views.blocks.index_fill_(0, self.stale_blocks, 0)
        if self.tokens is None and self.kernel is not None:
            self.kernel(key, value, self.slots, views.keys, views.values)
            return
        if self.tokens is not None:
            key, value = key.index_select(0, self.tokens), value.index_select(0, self.tokens)
        elif self.num_tokens < len(key):
            key, value = key[: self.num_tokens], value[: self.num_tokens]
        views.keys.index_copy_(0, self.slots, key)
        views.values.index_copy_(0, self.slots, value)


def plan_write(
    batch: _Batch,
    *,
    block_size: int,
    parts_per_block: int,
    indices: StepArrays,
    kernel: CacheWrite | None,
) -> WritePlan:
    """Return the plan of one step. `parts_per_block` is as in `LayerViews`."""
    stops = np.cumsum(batch.query_lens, dtype=np.int64)
    slots = batch.slot_mapping[: int(stops[-1]) if len(stops) else 0]
    is_written = slots >= 0
    tokens = None
    if is_written.all():
        stale = _unfilled_tails(batch, slots, stops, block_size)
    else:
        stale = _unfilled_blocks(batch, slots, is_written, block_size)
        written = np.flatnonzero(is_written)
        slots = slots[written]
        tokens_array, tokens = indices.allocate(len(written))
        tokens_array[:] = written
    blocks, offsets = np.divmod(slots, block_size)
    slots_array, slots_tensor = indices.allocate(len(slots))
    np.add(blocks * (parts_per_block * block_size), offsets, out=slots_array)
    stale_blocks = None
    if len(stale):
        array, stale_blocks = indices.allocate(2 * len(stale))
        np.multiply(stale, parts_per_block, out=array[: len(stale)])
        np.add(array[: len(stale)], 1, out=array[len(stale) :])
    return WritePlan(
        num_tokens=len(slots),
        tokens=tokens,
        slots=slots_tensor,
        stale_blocks=stale_blocks,
        kernel=kernel,
    )


def _unfilled_tails(batch: _Batch, slots: _Ints, stops: _Ints, block_size: int) -> _Ints:
    """Return the last block of each sequence that the step begins but does not fill."""
    tails = batch.seq_lens % block_size
    is_begun = batch.seq_lens - tails >= batch.seq_lens - batch.query_lens
    tails_begun: _Ints = slots[stops[is_begun & (tails != 0)] - 1] // block_size
    return tails_begun


def _unfilled_blocks(
    batch: _Batch, slots: _Ints, is_written: npt.NDArray[np.bool_], block_size: int
) -> _Ints:
    """Return all blocks that the step begins but does not fill, if not all tokens are written."""
    contexts = batch.seq_lens.astype(np.int64) - batch.query_lens
    firsts = np.cumsum(batch.query_lens, dtype=np.int64) - batch.query_lens
    positions = np.arange(len(slots)) + np.repeat(contexts - firsts, batch.query_lens)
    is_begun = positions - positions % block_size >= np.repeat(contexts, batch.query_lens)
    blocks, counts = np.unique(slots[is_begun & is_written] // block_size, return_counts=True)
    unfilled: _Ints = blocks[counts < block_size]
    return unfilled
