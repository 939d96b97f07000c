"""Plans of torch_sdpa on a CPU for decodes that torch computes.

Decodes are split into chunks, so that keys and values stay in the CPU's cache between gather and
GEMM.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.cpu.bias import BandedBias
from attention.cpu.buffers import StepArrays
from attention.cpu.gather import Gather, Gatherer
from attention.params import AttentionParams, AttentionSpec

__all__ = ["DecodeChunk", "DecodePlanner"]

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
