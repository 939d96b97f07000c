"""How the torch_sdpa backend brings blocks of the cache side by side.

In scratch, each sequence has all its keys and then all its values. Threads share out the rows of
a copy and the sequences of a product alike, so that each finds in its own cache what it copied.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.params import AttentionParams, AttentionSpec
from attention.sdpa_buffers import Scratch, Staging

__all__ = ["Gather", "Gatherer"]


class Gather(NamedTuple):
    """A read of blocks: `index_select(blocks, 0, rows, out=scratch)` makes the views true."""

    rows: torch.Tensor
    """Rows of `LayerRows.blocks`."""
    scratch: torch.Tensor
    keys: torch.Tensor
    """View of the scratch, `[num_sequences, num_kv_heads, num_keys, head_size]`."""
    values: torch.Tensor


class Gatherer:
    """Makes gathers for layers of one shape; all of them share one scratch."""

    def __init__(
        self, params: AttentionParams, *, spec: AttentionSpec, indices: Staging, scratch: Scratch
    ) -> None:
        self._head_size = params.head_size
        self._num_kv_heads = params.num_kv_heads
        self._slot_size = params.num_kv_heads * params.head_size
        self._block_size = spec.block_size
        self._rows_per_block = 2 * len(spec.layers)
        self._indices = indices
        self._scratch = scratch
        self._views: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

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
        return Gather(index.view(-1), *views)

    def _make_views(
        self, num_sequences: int, width: int, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        row = self._block_size * self._slot_size
        size = width * row
        scratch = self._scratch.take(2 * num_sequences * size)
        shape = (num_sequences, self._num_kv_heads, stop - start, self._head_size)
        strides = (2 * size, self._head_size, self._slot_size, 1)
        offset = start * self._slot_size
        return (
            scratch.view(-1, row),
            scratch.as_strided(shape, strides, offset),
            scratch.as_strided(shape, strides, offset + size),
        )
