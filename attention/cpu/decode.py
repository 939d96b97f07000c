"""Plans of the torch_sdpa backend for sequences with a query of one token.

They are cut into chunks whose keys and values stay in the CPU's cache between gather and product.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.cpu.bias import Staircase
from attention.cpu.buffers import Staging
from attention.cpu.gather import Gather, Gatherer
from attention.params import AttentionParams, AttentionSpec

__all__ = ["DecodeChunk", "DecodePlanner"]

_Ints = npt.NDArray[np.int64]
_Lengths = npt.NDArray[np.int32]

# Bytes of keys and values per chunk and thread: half of a large core's own cache.
_CHUNK_BYTES_ON_CPU = 1 << 20
# A GPU gains nothing from its caches here, so there a chunk only bounds the scratch.
_CHUNK_BYTES_ON_GPU = 256 << 20
# Bytes of padding that cost as much as one more chunk.
_CHUNK_OVERHEAD_BYTES = 256 << 10


class DecodeChunk(NamedTuple):
    """Sequences that share one call."""

    start: int
    stop: int
    """Token rows of the step, if they are adjacent."""
    rows: torch.Tensor | None
    """Token rows of the step, if they are not."""
    gather: Gather
    bias: torch.Tensor | None


class DecodePlanner:
    """Plans decodes for the layers that have one set of parameters."""

    def __init__(
        self,
        params: AttentionParams,
        *,
        spec: AttentionSpec,
        staircase: Staircase,
        gatherer: Gatherer,
        indices: Staging,
        masks: Staging,
    ) -> None:
        self._block_size = spec.block_size
        self._window = params.sliding_window
        self._has_bias = params.alibi_slopes is not None
        self._staircase = staircase
        self._gatherer = gatherer
        self._indices = indices
        self._masks = masks
        slots_bytes = 2 * params.num_kv_heads * params.head_size * spec.dtype.itemsize
        block_bytes = spec.block_size * slots_bytes
        chunk_bytes = _CHUNK_BYTES_ON_GPU
        if spec.device.type == "cpu":
            chunk_bytes = _CHUNK_BYTES_ON_CPU * torch.get_num_threads()
        self._max_blocks = max(1, chunk_bytes // block_bytes)
        self._overhead_blocks = _CHUNK_OVERHEAD_BYTES // block_bytes

    def plan(
        self, stops: _Lengths, rows: _Ints, tables: npt.NDArray[np.int32]
    ) -> tuple[DecodeChunk, ...]:
        """Return the chunks of sequences that see the keys before `stops`, by token row."""
        if not len(stops):
            return ()
        last_blocks = (stops - 1) // self._block_size
        starts = first_blocks = np.zeros_like(stops)
        if self._window is not None:
            starts = np.maximum(stops - self._window, 0)
            first_blocks = starts // self._block_size
        counts = last_blocks - first_blocks + 1
        order, cuts = self._cut(counts)
        # What pads a short table is its own last block: no one else's, and surely written.
        columns = np.arange(int(counts.max()), dtype=np.int32)
        columns = np.minimum(first_blocks[:, None] + columns, last_blocks[:, None])
        blocks = tables[np.arange(len(stops))[:, None], columns]
        base = first_blocks * self._block_size
        starts, stops = starts - base, stops - base
        if order is not None:
            rows, starts, stops, blocks = rows[order], starts[order], stops[order], blocks[order]
            counts = counts[order]
        return self._chunks(cuts, rows, starts, stops, blocks, counts, order is None)

    def _cut(self, counts: _Lengths) -> tuple[_Ints | None, list[int]]:
        """Return an order of the sequences, None for their own, and where chunks begin."""
        num, longest, total = len(counts), int(counts.max()), int(counts.sum())
        if longest * num - total <= total // 8 + self._overhead_blocks:
            size = max(1, self._max_blocks // longest)
            # As few chunks, but of even size.
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
        rows: _Ints,
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
        is_adjacent = is_rising and int(rows[-1]) - int(rows[0]) == len(rows) - 1
        order = None
        if not is_adjacent:
            order_array, order = self._indices.take(len(rows))
            order_array[:] = rows
        index = self._gatherer.index(blocks) if is_rising else None
        chunks = []
        for cut, end, first, last, is_uniform in zip(
            cuts, [*cuts[1:], len(rows)], firsts, lasts, are_uniform, strict=True
        ):
            if index is not None:
                part = index[cut:end]
            else:
                part = self._gatherer.index(blocks[cut:end, : int(counts[cut])])
            bias = None
            if self._has_bias or not is_uniform:
                num = 1 if is_uniform else end - cut
                array, bias = self._masks.take(*self._staircase.decode_shape(num, last - first))
                mask_rows = slice(cut, cut + num)
                self._staircase.fill_decode_bias(array, first, starts[mask_rows], stops[mask_rows])
            chunks.append(
                DecodeChunk(
                    start=int(rows[cut]),
                    stop=int(rows[cut]) + end - cut,
                    rows=None if order is None else order[cut:end],
                    gather=self._gatherer.gather(part, (first, last)),
                    bias=bias,
                )
            )
        return tuple(chunks)
