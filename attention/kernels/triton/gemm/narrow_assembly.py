"""PTX that multiplies four words of 8-bit or 4-bit weights by pairs of float16 inputs.

Operands are numbered as in `tl.inline_asm_elementwise`: outputs, weight words, inputs.
"""

from __future__ import annotations

__all__ = ["fp8_products", "int4_products", "mxfp4_products"]

_NUM_WORDS = 4


def fp8_products() -> str:
    """Return the code for words of float8_e4m3fn and eight words of adjacent inputs.

    The output is the sum of all 16 products.
    """
    lines = [
        ".reg .b16 low, high;",
        ".reg .b32 p, first, second;",
        ".reg .f32 x, y;",
    ]
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
    lines = [
        ".reg .b32 t, p, a, b, c, d;",
        ".reg .b16 low, high;",
        ".reg .f32 x, y;",
    ]
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
    lines = [
        ".reg .b32 t, p, q, a, b, c, d;",
        ".reg .b16 low, high;",
        ".reg .f32 x, y;",
    ]
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
