"""Finds the tokens of a program of a recurrent layer, among the segments of a step."""

from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.arguments import CHUNK_SIZE

__all__ = ["chunk_of_program", "count_chunks_before", "max_chunks"]

_TILE = tl.constexpr(128)
"""Segments that a program reads at a time."""
_CHUNK = tl.constexpr(CHUNK_SIZE)


def max_chunks(num_tokens: int, num_segments: int) -> int:
    """Return an upper bound of the chunks of some segments, and of the tokens behind them."""
    return num_tokens // CHUNK_SIZE + num_segments + 2


@triton.jit
def _num_chunks(
    query_starts: tl.tensor, segments: tl.tensor, is_segment: tl.tensor, skips_lone: tl.constexpr
) -> tl.tensor:
    """Return the number of chunks of each segment; `skips_lone` is as in `chunk_of_program`."""
    first = tl.load(query_starts + segments, mask=is_segment, other=0)
    num_tokens = tl.load(query_starts + segments + 1, mask=is_segment, other=0) - first
    if skips_lone:
        return num_tokens // _CHUNK + (num_tokens % _CHUNK > 1)
    return tl.cdiv(num_tokens, _CHUNK)


@triton.jit
def chunk_of_program(
    query_starts: tl.tensor,
    rows: tl.tensor,
    num_segments: tl.tensor,
    num_tokens: tl.tensor,
    index: tl.tensor,
    skips_lone: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the row and first token of a chunk, and the first token and end of its segment.

    `index` counts the chunks of all segments. With `skips_lone`, a chunk of one token at the end of
    a segment does not count. The tokens behind the last segment are chunks without a row, which is
    -1. Pointers: query_starts `[num_segments + 1]` int32, rows `[num_segments]` int32.
    """
    segment, chunk, count = 0, index, 0
    for start in range(0, num_segments, _TILE):
        segments = start + tl.arange(0, _TILE)
        is_segment = segments < num_segments
        counts = _num_chunks(query_starts, segments, is_segment, skips_lone)
        is_before = is_segment & (count + tl.cumsum(counts, axis=0) <= index)
        segment += tl.sum(is_before.to(tl.int32), axis=0)
        chunk -= tl.sum(tl.where(is_before, counts, 0), axis=0)
        count += tl.sum(counts, axis=0)
    is_segment = segment < num_segments
    row = tl.load(rows + segment, mask=is_segment, other=-1)
    first = tl.load(query_starts + segment)
    end = tl.load(query_starts + segment + 1, mask=is_segment, other=num_tokens)
    if skips_lone:
        end -= (is_segment & ((end - first) % _CHUNK == 1)).to(tl.int32)
    return row, first + chunk * _CHUNK, first, end


@triton.jit
def count_chunks_before(query_starts: tl.tensor, segment: tl.tensor) -> tl.tensor:
    """Return the number of chunks of all segments before one, without lone tokens."""
    count = 0
    for start in range(0, segment, _TILE):
        segments = start + tl.arange(0, _TILE)
        count += tl.sum(_num_chunks(query_starts, segments, segments < segment, True), axis=0)
    return count
