"""How the torch_sdpa backend brings blocks of the cache side by side.

In scratch, each sequence has all its keys and then all its values. Threads share out the rows of
a copy and the sequences of a product alike, so that each finds in its own cache what it copied.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.cpu.buffers import Scratch, Staging
from attention.fp8 import pair_table
from attention.params import KV_CACHE_DTYPES, AttentionParams, AttentionSpec

__all__ = ["Gather", "Gatherer"]


class GatherViews(NamedTuple):
    """Views of the scratch that a gather fills."""

    stored: torch.Tensor
    """Blocks as the cache holds them, one a row."""
    convert: Callable[[], object] | None
    """Fills `scratch` from `stored`, if the cache holds another type than the model's."""
    scratch: torch.Tensor
    """Blocks in the model's dtype; `stored` itself if the cache is of that type."""
    keys: torch.Tensor
    """View of `scratch`, `[num_sequences, num_kv_heads, num_keys, head_size]`."""
    values: torch.Tensor
    """As `keys`."""


class Gather(NamedTuple):
    """A read of blocks."""

    rows: torch.Tensor
    """Rows of `LayerRows.blocks`."""
    views: GatherViews

    def read(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, `[num_sequences, num_kv_heads, num_keys, head_size]`.

        Those of an fp8 cache are in the model's dtype, but not multiplied by a scale.
        """
        stored, convert, _, keys, values = self.views
        torch.index_select(blocks, 0, self.rows, out=stored)
        if convert is not None:
            convert()
        return keys, values


class Gatherer:
    """Makes gathers for layers of one shape; all of them share one scratch."""

    def __init__(
        self,
        params: AttentionParams,
        *,
        spec: AttentionSpec,
        indices: Staging,
        scratch: Scratch,
        stored: Scratch,
        pairs: Scratch,
    ) -> None:
        self._head_size = params.head_size
        self._num_kv_heads = params.num_kv_heads
        self._slot_size = params.num_kv_heads * params.head_size
        self._block_size = spec.block_size
        self._rows_per_block = 2 * spec.num_cache_layers
        self._fp8 = KV_CACHE_DTYPES[params.kv_cache_dtype]
        self._indices = indices
        self._scratch = scratch
        self._stored = stored
        self._pairs = pairs
        self._views: dict[tuple[int, ...], GatherViews] = {}

    def forget_views(self) -> None:
        """Forget the views of the last step, whose shapes hardly ever come back."""
        self._views.clear()

    def index(self, blocks: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return the rows of blocks `[num_sequences, width]`, as `[num_sequences, 2, width]`."""
        array, index = self._indices.take(len(blocks), 2, blocks.shape[1])
        np.multiply(blocks, self._rows_per_block, out=array[:, 0], dtype=np.int64)
        np.add(array[:, 0], 1, out=array[:, 1])
        return index

    def gather(self, index: torch.Tensor, keys: Sequence[int]) -> Gather:
        """Return the read of an index; the views show the slots from keys[0] to keys[1]."""
        num_sequences, _, width = index.shape
        shape = (num_sequences, width, *keys)
        views = self._views.get(shape)
        if views is None:
            views = self._views[shape] = self._make_views(*shape)
        return Gather(index.view(-1), views)

    def _make_views(self, num_sequences: int, width: int, start: int, stop: int) -> GatherViews:
        row = self._block_size * self._slot_size
        size = width * row
        scratch = self._scratch.take(2 * num_sequences * size)
        stored, convert = scratch, None
        if self._fp8 is not None:
            stored = self._stored.take(2 * num_sequences * size)
            convert = self._conversion(stored, scratch, self._fp8)
        shape = (num_sequences, self._num_kv_heads, stop - start, self._head_size)
        strides = (2 * size, self._head_size, self._slot_size, 1)
        offset = start * self._slot_size
        return GatherViews(
            stored=stored.view(-1, row),
            convert=convert,
            scratch=scratch.view(-1, row),
            keys=scratch.as_strided(shape, strides, offset),
            values=scratch.as_strided(shape, strides, offset + size),
        )

    def _conversion(
        self, stored: torch.Tensor, scratch: torch.Tensor, dtype: torch.dtype
    ) -> Callable[[], object]:
        """Return what fills the scratch from fp8 numbers."""
        # Keys and values are of equal size, so that there are always whole pairs.
        if scratch.device.type != "cpu":
            numbers = stored.view(dtype)
            return lambda: scratch.copy_(numbers)
        table = pair_table(dtype, scratch.dtype)
        pairs, wide = stored.view(torch.uint16), scratch.view(table.dtype)
        indices = self._pairs.take(len(pairs))

        def look_up() -> None:
            indices.copy_(pairs)
            torch.index_select(table, 0, indices, out=wide)

        return look_up
