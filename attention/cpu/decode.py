"""Plans of torch_sdpa on a CPU for decodes that torch computes.

Decodes are split into chunks, so that keys and values stay in the CPU's cache between gather and
GEMM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.fp8 import pair_table
from attention.params import KV_CACHE_DTYPES, AttentionParams, AttentionSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attention.cpu.bias import BandedBias
    from attention.cpu.buffers import Scratch, StepArrays

__all__ = ["DecodeChunk", "DecodePlanner", "Gather", "Gatherer"]

_Ints = npt.NDArray[np.int64]
_Lengths = npt.NDArray[np.int32]
# Bytes of keys and values per chunk and thread: half of the L2 cache of a large core.
_CHUNK_BYTES = 1 << 20
# Bytes of padding that take as long as one more chunk.
_CHUNK_OVERHEAD_BYTES = 256 << 10


class DecodeChunk(NamedTuple):
    """Decodes that share one call."""

    start: int
    stop: int
    """The tokens of the step, if they are adjacent."""
    tokens: torch.Tensor | None
    """The tokens of the step, if they are not."""
    gather: Gather
    bias: torch.Tensor | None


class DecodePlanner:
    """Plans decodes for layers with equal parameters."""

    def __init__(
        self,
        params: AttentionParams,
        *,
        spec: AttentionSpec,
        bias: BandedBias,
        gatherer: Gatherer,
        indices: StepArrays,
        biases: StepArrays,
    ) -> None:
        self._block_size = spec.block_size
        self._window = params.sliding_window
        self._has_bias = params.alibi_slopes is not None
        self._bias = bias
        self._gatherer = gatherer
        self._indices = indices
        self._biases = biases
        slots_bytes = 2 * params.num_kv_heads * params.head_size * spec.dtype.itemsize
        block_bytes = spec.block_size * slots_bytes
        self._max_blocks = max(1, _CHUNK_BYTES * torch.get_num_threads() // block_bytes)
        self._overhead_blocks = _CHUNK_OVERHEAD_BYTES // block_bytes

    def plan_chunks(
        self, stops: _Lengths, tokens: _Ints, tables: npt.NDArray[np.int32]
    ) -> tuple[DecodeChunk, ...]:
        """Return the chunks of sequences with these tokens, which see the keys before `stops`."""
        if not len(stops):
            return ()
        last_blocks = (stops - 1) // self._block_size
        starts = first_blocks = np.zeros_like(stops)
        if self._window is not None:
            starts = np.maximum(stops - self._window, 0)
            first_blocks = starts // self._block_size
        counts = last_blocks - first_blocks + 1
        order, cuts = self._cut(counts)
        # Short tables are padded with their own last block, which has finite content.
        columns = np.arange(int(counts.max()), dtype=np.int32)
        columns = np.minimum(first_blocks[:, None] + columns, last_blocks[:, None])
        blocks = tables[np.arange(len(stops))[:, None], columns]
        base = first_blocks * self._block_size
        starts, stops = starts - base, stops - base
        if order is not None:
            tokens, starts, stops = tokens[order], starts[order], stops[order]
            blocks = blocks[order]
            counts = counts[order]
        return self._chunks(cuts, tokens, starts, stops, blocks, counts, order is None)

    def _cut(self, counts: _Lengths) -> tuple[_Ints | None, list[int]]:
        """Return an order of the sequences (None for the given order), and the starts of chunks."""
        num, longest, total = len(counts), int(counts.max()), int(counts.sum())
        if longest * num - total <= total // 8 + self._overhead_blocks:
            size = max(1, self._max_blocks // longest)
            # The same number of chunks, but of equal size.
            size = -(-num // -(-num // size))
            return None, list(range(0, num, size))
        order = np.argsort(-counts, kind="stable")
        cuts, begin, used = [0], 0, 0
        for i, count in enumerate(counts[order].tolist()):
            if i == begin:
                longest = count
            padded = longest * (i + 1 - begin)
            used += count
            if i > begin and (
                padded > self._max_blocks or padded - used > used // 8 + self._overhead_blocks
            ):
                cuts.append(i)
                begin, used, longest = i, count, count
        return order, cuts

    def _chunks(
        self,
        cuts: list[int],
        tokens: _Ints,
        starts: _Lengths,
        stops: _Lengths,
        blocks: _Lengths,
        counts: _Lengths,
        is_rising: bool,
    ) -> tuple[DecodeChunk, ...]:
        """Return a chunk for each cut; sequences see their gathered slots from start to stop."""
        firsts = np.minimum.reduceat(starts, cuts).tolist()
        lasts = np.maximum.reduceat(stops, cuts).tolist()
        are_uniform = (
            (np.maximum.reduceat(starts, cuts) == firsts)
            & (np.minimum.reduceat(stops, cuts) == lasts)
        ).tolist()
        is_adjacent = is_rising and int(tokens[-1]) - int(tokens[0]) == len(tokens) - 1
        order = None
        if not is_adjacent:
            order_array, order = self._indices.allocate(len(tokens))
            order_array[:] = tokens
        index = self._gatherer.index(blocks) if is_rising else None
        chunks = []
        for cut, end, first, last, is_uniform in zip(
            cuts, [*cuts[1:], len(tokens)], firsts, lasts, are_uniform, strict=True
        ):
            if index is not None:
                selected = index[cut:end]
            else:
                selected = self._gatherer.index(blocks[cut:end, : int(counts[cut])])
            bias = None
            if self._has_bias or not is_uniform:
                num = 1 if is_uniform else end - cut
                array, bias = self._biases.allocate(*self._bias.decode_shape(num, last - first))
                part = slice(cut, cut + num)
                self._bias.fill_decode_bias(array, first, starts[part], stops[part])
            chunks.append(
                DecodeChunk(
                    start=int(tokens[cut]),
                    stop=int(tokens[cut]) + end - cut,
                    tokens=None if order is None else order[cut:end],
                    gather=self._gatherer.gather(selected, (first, last)),
                    bias=bias,
                )
            )
        return tuple(chunks)


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
        self._parts_per_block = 2 * spec.block_elements // params.block_elements(spec.block_size)
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
