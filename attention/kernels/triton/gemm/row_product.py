"""Products of a row with the weights of some columns, 16 bytes of a column per load of a thread.

Weights of 16 and 32 bits are multiplied in float32; weights of 8 and 4 bits are loaded as 32-bit
words for `narrow_products`. Tensor cores and shared memory are not used.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.triton.gemm.narrow_products import multiply_fp8, multiply_nibbles, row_inputs

__all__ = ["VECTOR_BYTES", "add_row_product", "scale_and_zero", "weight_vectors"]

VECTOR_BYTES = 16
"""Bytes of a column that a thread reads at a time."""


@triton.jit
def scale_and_zero(word: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the scales and zeros that `scale_words` has packed, both float32."""
    # The lowest mantissa bits of the float32 2**23 count integers, so this needs no conversion.
    zero = ((word & 255) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return (word & -256).to(tl.float32, bitcast=True), zero


@triton.jit
def weight_vectors(
    weight: tl.tensor,
    columns: tl.tensor,
    first: tl.tensor,
    size: tl.constexpr,
    tile: tl.constexpr,
    vector: tl.constexpr,
) -> tl.tensor:
    """Return weights `[columns, tile / vector, vector]`, from element `first` of each column on.

    Columns have `size` elements, a multiple of `vector`; past their end, the weights are zeros. A
    thread has whole vectors, at the same place in all columns.
    """
    elements = first + tl.arange(0, tile)
    places = weight + columns.to(tl.int64)[:, None] * size + elements[None, :]
    is_inside = (elements < size)[None, :] | (size % tile == 0)
    # Each weight is read once per step, so it need not stay in the cache.
    values = tl.load(places, mask=is_inside, other=0, eviction_policy="evict_first")
    return tl.reshape(values, [columns.shape[0], tile // vector, vector])


@triton.jit
def _group_words(
    scales: tl.tensor,
    columns: tl.tensor,
    num_columns: tl.tensor,
    starts: tl.tensor,
    size: tl.constexpr,
    group_size: tl.constexpr,
) -> tl.tensor:
    """Return the stored word of the group of inputs of each vector, `[columns, vectors]`."""
    places = scales + (starts // group_size)[:, None] * num_columns + columns[None, :]
    is_inside = (starts < size)[:, None] & (columns < num_columns)[None, :]
    # Threads load adjacent columns; the transposition gives each the words of its vectors.
    return tl.trans(tl.load(places, mask=is_inside, other=0))


@triton.jit
def add_row_product(
    sums: tl.tensor,
    values: tl.tensor,
    x: tl.tensor,
    scales: tl.tensor,
    columns: tl.tensor,
    num_columns: tl.tensor,
    first: tl.tensor,
    kind: tl.constexpr,
    size: tl.constexpr,
    num_scales: tl.constexpr,
    half: tl.constexpr,
    tile: tl.constexpr,
    vector: tl.constexpr,
    unpacks: tl.constexpr,
) -> tl.tensor:
    """Return `sums`, `[columns, tile / vector]` float32, plus the products of `weight_vectors`.

    `first`, `tile` and `vector` count elements of `values`: weights, or words of them. `kind` is
    "plain"; "fp8", with float32 scales `[num_columns, num_scales]`, which are applied here if a
    column has several; "int4", with words of `scale_words`, `[num_scales, num_columns]`; or
    "mxfp4", with uint8 exponents of that shape. The two numbers in a byte of int4 or mxfp4 belong
    to inputs that are `half` apart. `size` is that of the row. Columns from `num_columns` on have
    no scales. `unpacks` is false for Triton's interpreter.
    """
    starts = first + tl.arange(0, tile // vector) * vector
    if kind == "plain":
        inputs = row_inputs(x, starts, size, vector)
        sums += tl.sum(values.to(tl.float32) * inputs[None, :, :], axis=2)
    elif kind == "fp8":
        starts *= 4
        products = multiply_fp8(values, x, starts, size, unpacks)
        if num_scales > 1:
            blocks = starts // (size // num_scales)
            # Transposed, so that a thread gets the scales of its vectors.
            scale = tl.load(
                scales + columns[None, :] * num_scales + blocks[:, None],
                mask=(starts < size)[:, None] & (columns < num_columns)[None, :],
                other=0.0,
            )
            products *= tl.trans(scale)
        sums += products
    else:
        starts *= 4
        starts = tl.multiple_of(starts // half * (2 * half) + starts % half, 16)
        group_size: tl.constexpr = size // num_scales
        low_words = _group_words(scales, columns, num_columns, starts, size, group_size)
        high_words = _group_words(scales, columns, num_columns, starts + half, size, group_size)
        low_sums, high_sums, low_inputs, high_inputs = multiply_nibbles(
            values, x, starts, kind, size, half, unpacks
        )
        if kind == "int4":
            low_scale, low_zero = scale_and_zero(low_words)
            high_scale, high_zero = scale_and_zero(high_words)
            low_sums -= low_zero * low_inputs[None, :]
            high_sums -= high_zero * high_inputs[None, :]
        else:
            # The exponent of a float32 has the same bias.
            low_scale = (low_words.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            high_scale = (high_words.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        sums += low_sums * low_scale + high_sums * high_scale
    return sums
