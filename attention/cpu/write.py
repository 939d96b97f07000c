"""Writes the keys and values of a step to the cache, for torch_sdpa on a CPU."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from attention.batch import AttentionBatch, EncoderBatch
from attention.cpu.buffers import LayerViews, StepArrays
from attention.kernels.cpu.cache_write import CacheWrite

__all__ = ["WritePlan", "plan_write"]

_Ints = npt.NDArray[np.int64]
_Batch = AttentionBatch | EncoderBatch


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
    num_layers: int,
    indices: StepArrays,
    kernel: CacheWrite | None,
) -> WritePlan:
    """Return the plan of one step.

    `num_layers` is the length of the cache's layer axis.
    """
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
    np.add(blocks * (2 * num_layers * block_size), offsets, out=slots_array)
    stale_blocks = None
    if len(stale):
        array, stale_blocks = indices.allocate(2 * len(stale))
        np.multiply(stale, 2 * num_layers, out=array[: len(stale)])
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
