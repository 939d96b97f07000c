"""Device functions that read scores, and their keys, weights, noise and parameters."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "INF",
    "MAX_SPLITS",
    "NAN_KEY",
    "NOISE_KEY",
    "NO_TOKEN",
    "NUM_PARAMETERS",
    "SCALE",
    "TOP_K",
    "TOP_P",
    "UNIT",
    "floor_key",
    "is_sound",
    "keys_of",
    "load_lanes",
    "load_scores",
    "noise_bounds",
    "noise_of",
    "parameter",
    "row_maximum",
    "score_of",
    "units_of",
    "weight_scale",
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
"""1 / temperature"""
TOP_K = tl.constexpr(1)
TOP_P = tl.constexpr(2)
FLOOR = tl.constexpr(3)
"""temperature * log(min_p)"""
NOISE_KEY = tl.constexpr(4)
"""The bits of an int64."""
NUM_PARAMETERS = 5
_LOG2_E = tl.constexpr(1.4426950408889634)


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
def weight_scale(parameters: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return log2(e) / temperature of a row, float32."""
    return (parameter(parameters, SCALE, row) * _LOG2_E).to(tl.float32)


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


@triton.jit
def noise_of(ids: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Return the noise of tokens at an int64 key, as `workers.sampling.noise` defines it.

    A kernel that calls this is launched with `enable_fp_fusion=False`.
    """
    words = _words_of(ids, key)
    below = ((0x7FFFFFFF - words).to(tl.float32) + 0.5) * 4.656612873077393e-10
    exponents, parts = _split(below)
    # Near 1, float32 has too few bits for 1 - v.
    near = (words.to(tl.float32) + 0.5) * -4.656612873077393e-10
    parts = tl.where(words < 0x20000000, near, parts)
    exponents, parts = _split(-_log(exponents, parts))
    return -_log(exponents, parts)


@triton.jit
def noise_bounds(ids: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Return upper bounds of the noise of tokens at a key, in few instructions.

    The noise is at most -log(v), and log2(v) at least as linear in the bits of v. Integers of 23
    bits become floats as the lower bits of a float, as conversions take several cycles.
    """
    numbers = (_words_of(ids, key) >> 8 | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    bits = numbers.to(tl.int32, bitcast=True) >> 8 | 0x4B000000
    logs = (bits.to(tl.float32, bitcast=True) - 8388608.0) * 2.1153173e-05
    # log(2) * (127 + 23), and more than the rounding of a bound.
    return 103.9731 - logs


@triton.jit
def _words_of(ids: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Return 31 random bits for each token at a key, int32."""
    words = ids.to(tl.uint32) * 0x9E3779B9 + (key & 0xFFFFFFFF).to(tl.uint32)
    words = (words ^ (words >> 16)) * 0x21F0AAAD
    words = (words ^ (words >> 15) ^ ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)) * 0xD35A2D97
    return ((words ^ (words >> 15)) >> 1).to(tl.int32)


@triton.jit
def _split(numbers: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return e and x of numbers (1 + x) * 2**e, with x in [-1/4, 1/2)."""
    bits = numbers.to(tl.int32, bitcast=True)
    exponents = (bits - 0x3F400000) >> 23
    parts = (bits - (exponents << 23)).to(tl.float32, bitcast=True) - 1.0
    return exponents.to(tl.float32), parts


@triton.jit
def _log(exponents: tl.tensor, parts: tl.tensor) -> tl.tensor:
    """Return log((1 + part) * 2**exponent)."""
    sums = parts * -0.06638092547655106 + 0.14094771444797516
    sums = sums * parts + -0.17339035868644714
    sums = sums * parts + 0.20101404190063477
    sums = sums * parts + -0.24979183077812195
    sums = sums * parts + 0.33330535888671875
    sums = sums * parts + -0.500001847743988
    return (parts * parts) * sums + parts + exponents * 0.6931471805599453
