"""Products of a row with vectors of 8-bit and 4-bit weights, in pairs of float16.

This needs a third of the instructions of float32. To avoid overflow, a thread scales its inputs by
a power of two, and adds its sums to float32 after at most eight products.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["e2m1_numbers", "multiply_fp8", "multiply_nibbles", "row_inputs"]

_NUM_WORDS = 4


def fp8_products() -> str:
    """Return the code for words of float8_e4m3fn and eight words of adjacent inputs.

    The output is the sum of all 16 products.
    """
    lines = [".reg .b16 low, high;", ".reg .b32 p, first, second;", ".reg .f32 x, y;"]
    for word in range(_NUM_WORDS):
        lines.append(f"mov.b32 {{low, high}}, ${1 + word};")
        for half, sums, operand in (("low", "first", 0), ("high", "second", 1)):
            inputs = f"${1 + _NUM_WORDS + 2 * word + operand}"
            lines.append(f"cvt.rn.f16x2.e4m3x2 p, {half};")
            lines.append(_add(sums, "p", inputs, is_first=word == 0))
    return _block([*lines, *_sum("$0", "first", "second", spare="first")])


def int4_products() -> str:
    """Return the code for words of eight integers of 4 bits.

    The inputs are four words each: for the lower numbers of bytes 0 and 2, of bytes 1 and 3, and
    for the upper numbers of both. The outputs are the sums of the products of the lower and of the
    upper numbers, divided by 2**24 and 2**20, because numbers are read as subnormal float16.
    """
    lines = [".reg .b32 t, p, a, b, c, d;", ".reg .b16 low, high;", ".reg .f32 x, y;"]
    for word in range(_NUM_WORDS):
        lines.append(f"shr.u32 t, ${2 + word}, 8;")
        for index, sums in enumerate("abcd"):
            source = "t" if index % 2 else f"${2 + word}"
            mask = "0x000F000F" if index < 2 else "0x00F000F0"
            lines.append(f"and.b32 p, {source}, {mask};")
            lines.append(_add(sums, "p", _nibble_inputs(word, index), is_first=word == 0))
    return _block([*lines, *_sum("$0", "a", "b"), *_sum("$1", "c", "d")])


def mxfp4_products() -> str:
    """Return the code for words of eight numbers in e2m1; otherwise that of `int4_products`.

    The exponent and mantissa bits become the lowest exponent bits and the highest mantissa bit of
    float16, which divides by 2**14, the difference of the exponent biases.
    """
    lines = [".reg .b32 t, p, q, a, b, c, d;", ".reg .b16 low, high;", ".reg .f32 x, y;"]
    for word in range(_NUM_WORDS):
        for index, (sums, shift) in enumerate(zip("abcd", (12, 4, 8, 0), strict=True)):
            source = f"${2 + word}"
            if shift:
                lines.append(f"shl.b32 t, {source}, {shift};")
                source = "t"
            lines += [
                f"shr.u32 q, {source}, 3;",
                "and.b32 q, q, 0x0E000E00;",
                f"lop3.b32 p, {source}, 0x80008000, q, 0xEA;",
                _add(sums, "p", _nibble_inputs(word, index), is_first=word == 0),
            ]
    return _block([*lines, *_sum("$0", "a", "b"), *_sum("$1", "c", "d")])


def _nibble_inputs(word: int, index: int) -> str:
    """Return the operand of the inputs of a word, for one of its four pairs of numbers."""
    return f"${2 + _NUM_WORDS * (1 + index) + word}"


def _add(sums: str, numbers: str, inputs: str, *, is_first: bool) -> str:
    if is_first:
        return f"mul.rn.f16x2 {sums}, {numbers}, {inputs};"
    return f"fma.rn.f16x2 {sums}, {numbers}, {inputs}, {sums};"


def _sum(output: str, first: str, second: str, spare: str = "p") -> list[str]:
    """Return the code that adds up two pairs, the last addition in float32."""
    return [
        f"add.rn.f16x2 {spare}, {first}, {second};",
        f"mov.b32 {{low, high}}, {spare};",
        "cvt.f32.f16 x, low;",
        "cvt.f32.f16 y, high;",
        f"add.f32 {output}, x, y;",
    ]


def _block(lines: list[str]) -> str:
    return "\n".join(["{", *lines, "}"])


_FP8_PRODUCTS = tl.constexpr(fp8_products())
_INT4_PRODUCTS = tl.constexpr(int4_products())
_MXFP4_PRODUCTS = tl.constexpr(mxfp4_products())
_INPUT_EXPONENT = tl.constexpr(14)
"""Inputs of 4-bit weights are multiplied by two to the power of this.

It makes up for the division of the weights in `narrow_assembly`: by as much for e2m1, by more for
integers.
"""


@triton.jit
def row_inputs(
    x: tl.tensor, starts: tl.tensor, size: tl.constexpr, vector: tl.constexpr
) -> tl.tensor:
    """Return `[starts, vector]` elements of the row in float32, zeros beyond its end."""
    elements = starts[:, None] + tl.arange(0, vector)[None, :]
    return tl.load(x + elements, mask=elements < size, other=0.0).to(tl.float32)


@triton.jit
def _power_below(magnitudes: tl.tensor, up: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the powers of two that scale magnitudes to [1, 2), times `2**up`, and their inverses.

    The inverses do not include `2**up`.
    """
    exponents = (magnitudes.to(tl.int32, bitcast=True) >> 23) & 255
    exponents = tl.minimum(tl.maximum(exponents, 1 + up), 253)
    factors = ((254 + up - exponents) << 23).to(tl.float32, bitcast=True)
    return factors, (exponents << 23).to(tl.float32, bitcast=True)


@triton.jit
def _pairs(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return two float32 numbers as float16 in one word, `low` in the lower half."""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _fours(x: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the four slices of the last axis, of size 4, of a tensor with three."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _adjacent(
    inputs: tl.tensor, factors: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return inputs `[vectors, 8]` as four words of adjacent pairs, `[1, vectors]` each."""
    inputs *= factors[:, None]
    even, odd = tl.split(tl.reshape(inputs, [inputs.shape[0], 4, 2]))
    even, odd = tl.split(tl.reshape(_pairs(even, odd), [inputs.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first[None, :], second[None, :], third[None, :], fourth[None, :]


@triton.jit
def _interleaved(
    inputs: tl.tensor, factors: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return inputs `[vectors, 8]` as words of 0 and 2, 4 and 6, 1 and 3, and 5 and 7.

    Each is `[1, vectors]`.
    """
    inputs *= factors[:, None]
    even, odd = tl.split(tl.reshape(inputs, [inputs.shape[0], 2, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    first, third = tl.split(_pairs(first, third))
    second, fourth = tl.split(_pairs(second, fourth))
    return first[None, :], third[None, :], second[None, :], fourth[None, :]


@triton.jit
def _most(inputs: tl.tensor) -> tl.tensor:
    return tl.max(tl.abs(inputs), axis=1)


@triton.jit
def multiply_fp8(
    words: tl.tensor, x: tl.tensor, starts: tl.tensor, size: tl.constexpr, unpacks: tl.constexpr
) -> tl.tensor:
    """Return products of words `[columns, vectors, 4]` with 16 inputs from each start."""
    if unpacks:
        lower = row_inputs(x, starts, size, 8)
        upper = row_inputs(x, starts + 8, size, 8)
        factors, inverses = _power_below(tl.maximum(_most(lower), _most(upper)), 0)
        x0, x1, x2, x3 = _adjacent(lower, factors)
        x4, x5, x6, x7 = _adjacent(upper, factors)
        w0, w1, w2, w3 = _fours(words)
        products = tl.inline_asm_elementwise(
            _FP8_PRODUCTS,
            "=f,r,r,r,r,r,r,r,r,r,r,r,r",
            [w0, w1, w2, w3, x0, x1, x2, x3, x4, x5, x6, x7],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        products *= inverses[None, :]
    else:
        numbers = _bytes_of(words).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        products = _sums_of(numbers, row_inputs(x, starts, size, 16))
    return products


@triton.jit
def _bytes_of(words: tl.tensor) -> tl.tensor:
    """Return the bytes of words as integers, in an additional axis; for the interpreter."""
    return (words[:, :, :, None] >> (8 * tl.arange(0, 4))[None, None, None, :]) & 255


@triton.jit
def _sums_of(numbers: tl.tensor, inputs: tl.tensor) -> tl.tensor:
    """Return products of numbers of 16 bytes with inputs `[vectors, 16]`, for the interpreter."""
    inputs = tl.reshape(inputs, [inputs.shape[0], 4, 4])
    return tl.sum(tl.sum(numbers * inputs[None, :, :, :], axis=3), axis=2)


@triton.jit
def multiply_nibbles(
    words: tl.tensor,
    x: tl.tensor,
    starts: tl.tensor,
    kind: tl.constexpr,
    size: tl.constexpr,
    half: tl.constexpr,
    unpacks: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return products of both numbers of the bytes of words `[columns, vectors, 4]`.

    Lower nibbles are multiplied by 16 inputs from each start, upper nibbles by the inputs `half`
    later. `kind` is "int4", for integers from 0 to 15, or "mxfp4". After both products, returns the
    sums of the inputs of each, `[vectors]`.
    """
    if unpacks:
        low_a = row_inputs(x, starts, size, 8)
        low_b = row_inputs(x, starts + 8, size, 8)
        high_a = row_inputs(x, starts + half, size, 8)
        high_b = row_inputs(x, starts + half + 8, size, 8)
        low_inputs = tl.sum(low_a + low_b, axis=1)
        high_inputs = tl.sum(high_a + high_b, axis=1)
        most = tl.maximum(
            tl.maximum(_most(low_a), _most(low_b)), tl.maximum(_most(high_a), _most(high_b))
        )
        factors, inverses = _power_below(most, _INPUT_EXPONENT)
        a0, a1, b0, b1 = _interleaved(low_a, factors)
        a2, a3, b2, b3 = _interleaved(low_b, factors)
        c0, c1, d0, d1 = _interleaved(high_a, factors)
        c2, c3, d2, d3 = _interleaved(high_b, factors)
        w0, w1, w2, w3 = _fours(words)
        code: tl.constexpr = _INT4_PRODUCTS if kind == "int4" else _MXFP4_PRODUCTS
        low_sums, high_sums = tl.inline_asm_elementwise(
            code,
            "=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [w0, w1, w2, w3, a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        if kind == "int4":
            # The assembly divides integers by more than their inputs were multiplied by.
            low_sums *= 1024.0
            high_sums *= 64.0
        low_sums *= inverses[None, :]
        high_sums *= inverses[None, :]
    else:
        numbers = _bytes_of(words)
        low_row, high_row = row_inputs(x, starts, size, 16), row_inputs(x, starts + half, size, 16)
        if kind == "int4":
            low, high = (numbers & 15).to(tl.float32), (numbers >> 4).to(tl.float32)
        else:
            low, high = e2m1_numbers(numbers & 15), e2m1_numbers(numbers >> 4)
        low_sums, high_sums = _sums_of(low, low_row), _sums_of(high, high_row)
        low_inputs, high_inputs = tl.sum(low_row, axis=1), tl.sum(high_row, axis=1)
    return low_sums, high_sums, low_inputs, high_inputs


@triton.jit
def e2m1_numbers(bits: tl.tensor) -> tl.tensor:
    """Return numbers in e2m1 as float32."""
    exponent = (bits >> 1) & 3
    digit = (bits & 1).to(tl.float32) * 0.5
    power = tl.exp2(tl.maximum(exponent, 1).to(tl.float32) - 1.0)
    number = tl.where(exponent > 0, 1.0 + digit, digit) * power
    return tl.where(bits >= 8, -number, number)
