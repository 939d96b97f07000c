"""Gathers blocks of the cache for torch_sdpa on a CPU.

In scratch, each sequence has all its keys and then all its values. Torch divides copies and matrix
products among threads in the same way, so each thread finds its part in its own cache.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.cpu.buffers import Scratch, StepArrays
from attention.fp8 import pair_table
from attention.params import KV_CACHE_DTYPES, AttentionParams, AttentionSpec

__all__ = ["Gather", "Gatherer"]


class GatherViews(NamedTuple):
    """Views of the scratch that a gather fills."""

    stored: torch.Tensor
    """Blocks as the cache stores them, `[num_blocks, elements]`."""
    convert: Callable[[], object] | None
    """Fills `scratch` from `stored` if the cache is fp8."""
    scratch: torch.Tensor
    """Blocks in the model's dtype; `stored` itself if the cache has that dtype."""
    keys: torch.Tensor
    """View of `scratch`, `[num_sequences, num_kv_heads, num_keys, head_size]`."""
    values: torch.Tensor
    """Like `keys`."""


class Gather(NamedTuple):
    """A read of blocks."""

    indices: torch.Tensor
    """Indices into `LayerViews.blocks`."""
    views: GatherViews

    def read_blocks(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, `[num_sequences, num_kv_heads, num_keys, head_size]`.

        Keys and values of an fp8 cache are converted to the model's dtype, but not scaled.
        """
        stored, convert, _, keys, values = self.views
        torch.index_select(blocks, 0, self.indices, out=stored)
        if convert is not None:
            convert()
        return keys, values


class Gatherer:
    """Makes gathers for layers with equal parameters; all of them share one scratch."""

    def __init__(
        self,
        params: AttentionParams,
        *,
        spec: AttentionSpec,
        indices: StepArrays,
        scratch: Scratch,
        stored: Scratch,
        pairs: Scratch,
    ) -> None:
        self._head_size = params.head_size
        self._num_kv_heads = params.num_kv_heads
        self._slot_size = params.num_kv_heads * params.head_size
        self._block_size = spec.block_size
        self._parts_per_block = 2 * spec.num_cache_layers
        self._fp8 = KV_CACHE_DTYPES[params.kv_cache_dtype]
        self._indices = indices
        self._scratch = scratch
        self._stored = stored
        self._pairs = pairs
        self._views: dict[tuple[int, ...], GatherViews] = {}

    def forget_views(self) -> None:
        """Forget the views of the last step; their shapes rarely recur."""
        self._views.clear()

    def index(self, blocks: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return the indices of keys and values of blocks `[num_sequences, width]`.

        They are `[num_sequences, 2, width]` int64.
        """
        array, index = self._indices.allocate(len(blocks), 2, blocks.shape[1])
        np.multiply(blocks, self._parts_per_block, out=array[:, 0], dtype=np.int64)
        np.add(array[:, 0], 1, out=array[:, 1])
        return index

    def gather(self, index: torch.Tensor, keys: Sequence[int]) -> Gather:
        """Return the read of an index, with views of the slots from keys[0] to keys[1]."""
        num_sequences, _, width = index.shape
        shape = (num_sequences, width, *keys)
        views = self._views.get(shape)
        if views is None:
            views = self._views[shape] = self._make_views(*shape)
        return Gather(index.view(-1), views)

    def _make_views(self, num_sequences: int, width: int, start: int, stop: int) -> GatherViews:
        block = self._block_size * self._slot_size
        size = width * block
        scratch = self._scratch.allocate(2 * num_sequences * size)
        stored, convert = scratch, None
        if self._fp8 is not None:
            stored = self._stored.allocate(2 * num_sequences * size)
            convert = self._conversion(stored, scratch, self._fp8)
        shape = (num_sequences, self._num_kv_heads, stop - start, self._head_size)
        strides = (2 * size, self._head_size, self._slot_size, 1)
        offset = start * self._slot_size
        return GatherViews(
            stored=stored.view(-1, block),
            convert=convert,
            scratch=scratch.view(-1, block),
            keys=scratch.as_strided(shape, strides, offset),
            values=scratch.as_strided(shape, strides, offset + size),
        )

    def _conversion(
        self, stored: torch.Tensor, scratch: torch.Tensor, dtype: torch.dtype
    ) -> Callable[[], object]:
        """Return a function that fills the scratch from fp8 numbers, by pairs."""
        # Keys and values have the same size, so the number of elements is even.
        table = pair_table(dtype, scratch.dtype)
        pairs, wide = stored.view(torch.uint16), scratch.view(table.dtype)
        indices = self._pairs.allocate(len(pairs))

        def look_up() -> None:
            indices.copy_(pairs)
            torch.index_select(table, 0, indices, out=wide)

        return look_up
