"""Device functions that read scores, and their keys, weights and parameters."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "EMPTY",
    "INF",
    "MAX_SPLITS",
    "NAN_KEY",
    "NO_TOKEN",
    "NUM_PARAMETERS",
    "SCALE",
    "SMALLEST_KEY",
    "TOP_K",
    "TOP_P",
    "UNIFORM",
    "UNIT",
    "floor_key",
    "is_sound",
    "keys_of",
    "load_lanes",
    "load_scores",
    "parameter",
    "row_maximum",
    "score_of",
    "units_of",
]

NO_TOKEN = tl.constexpr(-1)
NAN_KEY = tl.constexpr(0x7FFFFFFF)
LARGEST_KEY = tl.constexpr(0x7F800000)
"""The key of +inf; that of NaN is larger."""
SMALLEST_KEY = tl.constexpr(-0x7F800001)
"""The key of -inf."""
UNIT = tl.constexpr(1099511627776.0)
INF = tl.constexpr(float("inf"))
EMPTY = tl.constexpr(-(1 << 63))
MAX_SPLITS = tl.constexpr(32)

# Rows of the parameters.
SCALE = tl.constexpr(0)
"""log2(e) / temperature"""
TOP_K = tl.constexpr(1)
TOP_P = tl.constexpr(2)
FLOOR = tl.constexpr(3)
"""temperature * log(min_p)"""
UNIFORM = tl.constexpr(4)
NUM_PARAMETERS = 5


@triton.jit
def keys_of(scores: tl.tensor, shift: tl.constexpr) -> tl.tensor:
    """Return int32 keys that sort like the scores, without the bits that the dtype leaves zero."""
    values = scores.to(tl.float32)
    # -0.0 and 0.0 are equal scores.
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(values != values, NAN_KEY, keys) >> shift


@triton.jit
def score_of(keys: tl.tensor, shift: tl.constexpr) -> tl.tensor:
    """Return the float32 scores of these keys."""
    bits = (keys << shift) | ((keys >> 31) & ((1 << shift) - 1))
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def units_of(scores: tl.tensor, highest: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return the weights of float32 scores, int64."""
    return (tl.exp2((scores - highest) * scale) * UNIT).to(tl.int64)


@triton.jit
def parameter(parameters: tl.tensor, which: tl.constexpr, row: tl.tensor) -> tl.tensor:
    """Return a parameter of a row, float64."""
    return tl.load(parameters + which * tl.num_programs(0) + row)


@triton.jit
def load_scores(
    scores: tl.tensor, start: tl.tensor, vocab_size: tl.tensor, tile: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the scores, float32, and ids of a tile of a row; -inf past the vocabulary."""
    ids = start + tl.arange(0, tile)
    loaded = tl.load(scores + ids, mask=ids < vocab_size, other=-INF)
    return loaded.to(tl.float32), ids


@triton.jit
def load_lanes(
    scores: tl.tensor, start: tl.tensor, end: tl.tensor, lanes: tl.constexpr, width: tl.constexpr
) -> tl.tensor:
    """Return the scores from `start` on, `[lanes, width]` float32; -inf from `end` on.

    Each of `lanes` threads has `width` adjacent scores.
    """
    ids = start + tl.arange(0, lanes * width)
    loaded = tl.load(scores + ids, mask=ids < end, other=-INF)
    return tl.reshape(loaded, (lanes, width)).to(tl.float32)


@triton.jit
def row_maximum(
    maxima: tl.tensor, row: tl.tensor, splits: tl.tensor, stride: tl.tensor = MAX_SPLITS
) -> tl.tensor:
    """Return the largest element of a row of int64 `[num_rows, stride]`.

    The key is in its upper half, and the inverted id in its lower half.
    """
    columns = tl.arange(0, MAX_SPLITS)
    found = tl.load(maxima + row * stride + columns, mask=columns < splits, other=EMPTY)
    return tl.max(found, axis=0)


@triton.jit
def is_sound(key: tl.tensor) -> tl.tensor:
    """Return whether the largest score, by its unshifted key, is finite."""
    return (key < LARGEST_KEY) & (key > SMALLEST_KEY)


@triton.jit
def floor_key(
    parameters: tl.tensor, highest: tl.tensor, row: tl.tensor, shift: tl.constexpr
) -> tl.tensor:
    """Return the key of the least score that min_p keeps."""
    bound = highest.to(tl.float64) + parameter(parameters, FLOOR, row)
    rounded = bound.to(tl.float32)
    key = keys_of(rounded, 0)
    key = tl.where(rounded.to(tl.float64) < bound, key + 1, key)
    key = tl.maximum(key, SMALLEST_KEY + 1)
    # The bits that `shift` removes are 1 in negative keys, and 0 in others.
    return tl.where(key < 0, key >> shift, (key + ((1 << shift) - 1)) >> shift)
