"""Products of a row with some columns' weights, 16 bytes of a column at a time by each thread.

Weights of 16 and 32 bits are multiplied in float32. Those of 8 and 4 bits are read as words of 32
bits and multiplied in pairs of float16, which takes a third of the instructions: a thread divides
its inputs by a power of two, so that they fit, and adds its products up in float32 after at most
eight of them. Tensor cores and shared memory are not used.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_row_product", "e2m1_numbers", "scale_and_zero", "weight_vectors"]

# Inputs: four words of weights and eight of inputs.
_FP8_PRODUCT = tl.constexpr(
    """
    {
    .reg .b16 low, high;
    .reg .b32 p, first, second;
    .reg .f32 x, y;
    mov.b32 {low, high}, $1;
    cvt.rn.f16x2.e4m3x2 p, low;
    mul.rn.f16x2 first, p, $5;
    cvt.rn.f16x2.e4m3x2 p, high;
    mul.rn.f16x2 second, p, $6;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 p, low;
    fma.rn.f16x2 first, p, $7, first;
    cvt.rn.f16x2.e4m3x2 p, high;
    fma.rn.f16x2 second, p, $8, second;
    mov.b32 {low, high}, $3;
    cvt.rn.f16x2.e4m3x2 p, low;
    fma.rn.f16x2 first, p, $9, first;
    cvt.rn.f16x2.e4m3x2 p, high;
    fma.rn.f16x2 second, p, $10, second;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 p, low;
    fma.rn.f16x2 first, p, $11, first;
    cvt.rn.f16x2.e4m3x2 p, high;
    fma.rn.f16x2 second, p, $12, second;
    add.rn.f16x2 first, first, second;
    mov.b32 {low, high}, first;
    cvt.f32.f16 x, low;
    cvt.f32.f16 y, high;
    add.f32 $0, x, y;
    }
    """
)
# Inputs: four words of weights, the inputs of bytes 0 and 2 and of bytes 1 and 3 for the lower
# numbers, the same for the upper ones, and the zeros: 1024 plus that of the lower numbers, and -64
# less that of the upper ones. Integers of four bits become 1024 and more in float16, whose last
# bits they are, or 16 times as much.
_INT4_PRODUCTS = tl.constexpr(
    """
    {
    .reg .b32 t, p, sixteenth, a, b, c, d;
    .reg .b16 low, high;
    .reg .f32 x, y;
    mov.b32 sixteenth, 0x2C002C00;
    shr.u32 t, $2, 8;
    lop3.b32 p, $2, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 p, p, $22;
    mul.rn.f16x2 a, p, $6;
    lop3.b32 p, t, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 p, p, $22;
    mul.rn.f16x2 b, p, $10;
    lop3.b32 p, $2, 0x00F000F0, 0x64006400, 0xEA;
    fma.rn.f16x2 p, p, sixteenth, $23;
    mul.rn.f16x2 c, p, $14;
    lop3.b32 p, t, 0x00F000F0, 0x64006400, 0xEA;
    fma.rn.f16x2 p, p, sixteenth, $23;
    mul.rn.f16x2 d, p, $18;
    shr.u32 t, $3, 8;
    lop3.b32 p, $3, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 p, p, $22;
    fma.rn.f16x2 a, p, $7, a;
    lop3.b32 p, t, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 p, p, $22;
    fma.rn.f16x2 b, p, $11, b;
    lop3.b32 p, $3, 0x00F000F0, 0x64006400, 0xEA;
    fma.rn.f16x2 p, p, sixteenth, $23;
    fma.rn.f16x2 c, p, $15, c;
    lop3.b32 p, t, 0x00F000F0, 0x64006400, 0xEA;
    fma.rn.f16x2 p, p, sixteenth, $23;
    fma.rn.f16x2 d, p, $19, d;
    shr.u32 t, $4, 8;
    lop3.b32 p, $4, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 p, p, $22;
    fma.rn.f16x2 a, p, $8, a;
    lop3.b32 p, t, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 p, p, $22;
    fma.rn.f16x2 b, p, $12, b;
    lop3.b32 p, $4, 0x00F000F0, 0x64006400, 0xEA;
    fma.rn.f16x2 p, p, sixteenth, $23;
    fma.rn.f16x2 c, p, $16, c;
    lop3.b32 p, t, 0x00F000F0, 0x64006400, 0xEA;
    fma.rn.f16x2 p, p, sixteenth, $23;
    fma.rn.f16x2 d, p, $20, d;
    shr.u32 t, $5, 8;
    lop3.b32 p, $5, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 p, p, $22;
    fma.rn.f16x2 a, p, $9, a;
    lop3.b32 p, t, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 p, p, $22;
    fma.rn.f16x2 b, p, $13, b;
    lop3.b32 p, $5, 0x00F000F0, 0x64006400, 0xEA;
    fma.rn.f16x2 p, p, sixteenth, $23;
    fma.rn.f16x2 c, p, $17, c;
    lop3.b32 p, t, 0x00F000F0, 0x64006400, 0xEA;
    fma.rn.f16x2 p, p, sixteenth, $23;
    fma.rn.f16x2 d, p, $21, d;
    add.rn.f16x2 p, a, b;
    mov.b32 {low, high}, p;
    cvt.f32.f16 x, low;
    cvt.f32.f16 y, high;
    add.f32 $0, x, y;
    add.rn.f16x2 p, c, d;
    mov.b32 {low, high}, p;
    cvt.f32.f16 x, low;
    cvt.f32.f16 y, high;
    add.f32 $1, x, y;
    }
    """
)
# The same without zeros. Exponent and digit of e2m1 become the last of an exponent and the first of
# the digits of float16, which divides by 2**14, the difference of the exponents' biases.
_MXFP4_PRODUCTS = tl.constexpr(
    """
    {
    .reg .b32 t, p, q, a, b, c, d;
    .reg .b16 low, high;
    .reg .f32 x, y;
    shl.b32 t, $2, 12;
    shr.u32 q, t, 3;
    and.b32 q, q, 0x0E000E00;
    lop3.b32 p, t, 0x80008000, q, 0xEA;
    mul.rn.f16x2 a, p, $6;
    shl.b32 t, $2, 4;
    shr.u32 q, t, 3;
    and.b32 q, q, 0x0E000E00;
    lop3.b32 p, t, 0x80008000, q, 0xEA;
    mul.rn.f16x2 b, p, $10;
    shl.b32 t, $2, 8;
    shr.u32 q, t, 3;
    and.b32 q, q, 0x0E000E00;
    lop3.b32 p, t, 0x80008000, q, 0xEA;
    mul.rn.f16x2 c, p, $14;
    shr.u32 q, $2, 3;
    and.b32 q, q, 0x0E000E00;
    lop3.b32 p, $2, 0x80008000, q, 0xEA;
    mul.rn.f16x2 d, p, $18;
    shl.b32 t, $3, 12;
    shr.u32 q, t, 3;
    and.b32 q, q, 0x0E000E00;
    lop3.b32 p, t, 0x80008000, q, 0xEA;
    fma.rn.f16x2 a, p, $7, a;
    shl.b32 t, $3, 4;
    shr.u32 q, t, 3;
    and.b32 q, q, 0x0E000E00;
    lop3.b32 p, t, 0x80008000, q, 0xEA;
    fma.rn.f16x2 b, p, $11, b;
    shl.b32 t, $3, 8;
    shr.u32 q, t, 3;
    and.b32 q, q, 0x0E000E00;
    lop3.b32 p, t, 0x80008000, q, 0xEA;
    fma.rn.f16x2 c, p, $15, c;
    shr.u32 q, $3, 3;
    and.b32 q, q, 0x0E000E00;
    lop3.b32 p, $3, 0x80008000, q, 0xEA;
    fma.rn.f16x2 d, p, $19, d;
    shl.b32 t, $4, 12;
    shr.u32 q, t, 3;
    and.b32 q, q, 0x0E000E00;
    lop3.b32 p, t, 0x80008000, q, 0xEA;
    fma.rn.f16x2 a, p, $8, a;
    shl.b32 t, $4, 4;
    shr.u32 q, t, 3;
    and.b32 q, q, 0x0E000E00;
    lop3.b32 p, t, 0x80008000, q, 0xEA;
    fma.rn.f16x2 b, p, $12, b;
    shl.b32 t, $4, 8;
    shr.u32 q, t, 3;
    and.b32 q, q, 0x0E000E00;
    lop3.b32 p, t, 0x80008000, q, 0xEA;
    fma.rn.f16x2 c, p, $16, c;
    shr.u32 q, $4, 3;
    and.b32 q, q, 0x0E000E00;
    lop3.b32 p, $4, 0x80008000, q, 0xEA;
    fma.rn.f16x2 d, p, $20, d;
    shl.b32 t, $5, 12;
    shr.u32 q, t, 3;
    and.b32 q, q, 0x0E000E00;
    lop3.b32 p, t, 0x80008000, q, 0xEA;
    fma.rn.f16x2 a, p, $9, a;
    shl.b32 t, $5, 4;
    shr.u32 q, t, 3;
    and.b32 q, q, 0x0E000E00;
    lop3.b32 p, t, 0x80008000, q, 0xEA;
    fma.rn.f16x2 b, p, $13, b;
    shl.b32 t, $5, 8;
    shr.u32 q, t, 3;
    and.b32 q, q, 0x0E000E00;
    lop3.b32 p, t, 0x80008000, q, 0xEA;
    fma.rn.f16x2 c, p, $17, c;
    shr.u32 q, $5, 3;
    and.b32 q, q, 0x0E000E00;
    lop3.b32 p, $5, 0x80008000, q, 0xEA;
    fma.rn.f16x2 d, p, $21, d;
    add.rn.f16x2 p, a, b;
    mov.b32 {low, high}, p;
    cvt.f32.f16 x, low;
    cvt.f32.f16 y, high;
    add.f32 $0, x, y;
    add.rn.f16x2 p, c, d;
    mov.b32 {low, high}, p;
    cvt.f32.f16 x, low;
    cvt.f32.f16 y, high;
    add.f32 $1, x, y;
    }
    """
)
_MXFP4_EXPONENT = tl.constexpr(14)


@triton.jit
def scale_and_zero(word: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return what `scale_words` has put into words, both float32."""
    return (word & -256).to(tl.float32, bitcast=True), (word & 255).to(tl.float32)


@triton.jit
def weight_vectors(
    weight: tl.tensor,
    columns: tl.tensor,
    first: tl.tensor,
    size: tl.constexpr,
    tile: tl.constexpr,
    vector: tl.constexpr,
) -> tl.tensor:
    """Return weights `[columns, tile / vector, vector]`, from `first` of columns of `size`.

    Beyond their end, which no vector has inside, they are zeros. A thread gets whole vectors, of
    the same place in all columns.
    """
    elements = first + tl.arange(0, tile)
    places = weight + columns.to(tl.int64)[:, None] * size + elements[None, :]
    is_inside = (elements < size)[None, :] | (size % tile == 0)
    # Every weight is read once a step.
    values = tl.load(places, mask=is_inside, other=0, eviction_policy="evict_first")
    return tl.reshape(values, [columns.shape[0], tile // vector, vector])


@triton.jit
def _inputs(x: tl.tensor, starts: tl.tensor, size: tl.constexpr, vector: tl.constexpr) -> tl.tensor:
    """Return `[starts, vector]` elements of the row in float32, zeros beyond its end."""
    elements = starts[:, None] + tl.arange(0, vector)[None, :]
    return tl.load(x + elements, mask=elements < size, other=0.0).to(tl.float32)


@triton.jit
def _group_words(
    scales: tl.tensor,
    columns: tl.tensor,
    num_columns: tl.tensor,
    starts: tl.tensor,
    size: tl.constexpr,
    group_size: tl.constexpr,
) -> tl.tensor:
    """Return what is stored of the groups of inputs that vectors are in, `[columns, vectors]`."""
    places = scales + (starts // group_size)[:, None] * num_columns + columns[None, :]
    is_inside = (starts < size)[:, None] & (columns < num_columns)[None, :]
    # A thread reads adjacent columns, and gets those of the vectors that it has.
    return tl.trans(tl.load(places, mask=is_inside, other=0))


@triton.jit
def _power_below(magnitudes: tl.tensor, up: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return powers of two that bring magnitudes between 1 and 2, and their inverses.

    The former are multiplied by `2**up`.
    """
    exponents = (magnitudes.to(tl.int32, bitcast=True) >> 23) & 255
    exponents = tl.minimum(tl.maximum(exponents, 1 + up), 253)
    factors = ((254 + up - exponents) << 23).to(tl.float32, bitcast=True)
    return factors, (exponents << 23).to(tl.float32, bitcast=True)


@triton.jit
def _pairs(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return two numbers as float16 in a word."""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;",
        "=r,f,f",
        [low, high],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _fours(x: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the four elements of the last of three axes."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _adjacent(
    inputs: tl.tensor, factors: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return inputs `[vectors, 8]` as four words of adjacent pairs."""
    inputs *= factors[:, None]
    even, odd = tl.split(tl.reshape(inputs, [inputs.shape[0], 4, 2]))
    even, odd = tl.split(tl.reshape(_pairs(even, odd), [inputs.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _interleaved(
    inputs: tl.tensor, factors: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return inputs `[vectors, 8]` as words of 0 and 2, 4 and 6, 1 and 3, and 5 and 7."""
    inputs *= factors[:, None]
    even, odd = tl.split(tl.reshape(inputs, [inputs.shape[0], 2, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    first, third = tl.split(_pairs(first, third))
    second, fourth = tl.split(_pairs(second, fourth))
    return first, third, second, fourth


@triton.jit
def _most(inputs: tl.tensor) -> tl.tensor:
    return tl.max(tl.abs(inputs), axis=1)


@triton.jit
def _fp8_products(
    words: tl.tensor, x: tl.tensor, starts: tl.tensor, size: tl.constexpr, unpacks: tl.constexpr
) -> tl.tensor:
    """Return products of words `[columns, vectors, 4]` with 16 inputs from each start."""
    lower = _inputs(x, starts, size, 8)
    upper = _inputs(x, starts + 8, size, 8)
    if unpacks:
        factors, inverses = _power_below(tl.maximum(_most(lower), _most(upper)), 0)
        x0, x1, x2, x3 = _adjacent(lower, factors)
        x4, x5, x6, x7 = _adjacent(upper, factors)
        w0, w1, w2, w3 = _fours(words)
        products = tl.inline_asm_elementwise(
            _FP8_PRODUCT,
            "=f,r,r,r,r,r,r,r,r,r,r,r,r",
            [
                w0,
                w1,
                w2,
                w3,
                x0[None, :],
                x1[None, :],
                x2[None, :],
                x3[None, :],
                x4[None, :],
                x5[None, :],
                x6[None, :],
                x7[None, :],
            ],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        products *= inverses[None, :]
    else:
        products = tl.zeros([words.shape[0], words.shape[1]], tl.float32)
        for index in tl.static_range(16):
            word = tl.sum(_only(words, index // 4), axis=2)
            byte = ((word >> (8 * (index % 4))) & 255).to(tl.uint8)
            number = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            products += number * _input(lower, upper, index)[None, :]
    return products


@triton.jit
def _only(x: tl.tensor, index: tl.constexpr) -> tl.tensor:
    """Return a tensor with zeros but for one index of its last axis, for the interpreter."""
    places = tl.arange(0, x.shape[len(x.shape) - 1])
    if len(x.shape) == 3:  # noqa: SIM108  # Triton's compiler takes statements.
        is_it = (places == index)[None, None, :]
    else:
        is_it = (places == index)[None, :]
    return tl.where(is_it, x, tl.zeros_like(x))


@triton.jit
def _input(lower: tl.tensor, upper: tl.tensor, index: tl.constexpr) -> tl.tensor:
    """Return one of 16 inputs of each vector, for the interpreter."""
    return tl.sum(_only(lower, index) if index < 8 else _only(upper, index - 8), axis=1)


@triton.jit
def _nibble_products(
    words: tl.tensor,
    x: tl.tensor,
    starts: tl.tensor,
    low_zero: tl.tensor,
    high_zero: tl.tensor,
    kind: tl.constexpr,
    size: tl.constexpr,
    half: tl.constexpr,
    unpacks: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return products of both numbers of the bytes of words `[columns, vectors, 4]`.

    The lower ones are multiplied by 16 inputs from each start, the upper ones by those that are
    `half` behind. The zeros of "int4" are integers `[columns, vectors]`.
    """
    low_a = _inputs(x, starts, size, 8)
    low_b = _inputs(x, starts + 8, size, 8)
    high_a = _inputs(x, starts + half, size, 8)
    high_b = _inputs(x, starts + half + 8, size, 8)
    if unpacks:
        up: tl.constexpr = _MXFP4_EXPONENT if kind == "mxfp4" else 0
        most = tl.maximum(
            tl.maximum(_most(low_a), _most(low_b)), tl.maximum(_most(high_a), _most(high_b))
        )
        factors, inverses = _power_below(most, up)
        a0, a1, b0, b1 = _interleaved(low_a, factors)
        a2, a3, b2, b3 = _interleaved(low_b, factors)
        c0, c1, d0, d1 = _interleaved(high_a, factors)
        c2, c3, d2, d3 = _interleaved(high_b, factors)
        w0, w1, w2, w3 = _fours(words)
        if kind == "int4":
            low_sums, high_sums = tl.inline_asm_elementwise(
                _INT4_PRODUCTS,
                "=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                [
                    w0,
                    w1,
                    w2,
                    w3,
                    a0[None, :],
                    a1[None, :],
                    a2[None, :],
                    a3[None, :],
                    b0[None, :],
                    b1[None, :],
                    b2[None, :],
                    b3[None, :],
                    c0[None, :],
                    c1[None, :],
                    c2[None, :],
                    c3[None, :],
                    d0[None, :],
                    d1[None, :],
                    d2[None, :],
                    d3[None, :],
                    (low_zero | 0x6400) * 0x10001,
                    ((high_zero << 4) | 0x5400) * 0x10001 ^ -0x7FFF8000,
                ],
                dtype=(tl.float32, tl.float32),
                is_pure=True,
                pack=1,
            )
        else:
            low_sums, high_sums = tl.inline_asm_elementwise(
                _MXFP4_PRODUCTS,
                "=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                [
                    w0,
                    w1,
                    w2,
                    w3,
                    a0[None, :],
                    a1[None, :],
                    a2[None, :],
                    a3[None, :],
                    b0[None, :],
                    b1[None, :],
                    b2[None, :],
                    b3[None, :],
                    c0[None, :],
                    c1[None, :],
                    c2[None, :],
                    c3[None, :],
                    d0[None, :],
                    d1[None, :],
                    d2[None, :],
                    d3[None, :],
                ],
                dtype=(tl.float32, tl.float32),
                is_pure=True,
                pack=1,
            )
        low_sums *= inverses[None, :]
        high_sums *= inverses[None, :]
    else:
        low_sums = tl.zeros([words.shape[0], words.shape[1]], tl.float32)
        high_sums = tl.zeros([words.shape[0], words.shape[1]], tl.float32)
        for index in tl.static_range(16):
            word = tl.sum(_only(words, index // 4), axis=2) >> (8 * (index % 4))
            if kind == "int4":
                low = ((word & 15) - low_zero).to(tl.float32)
                high = (((word >> 4) & 15) - high_zero).to(tl.float32)
            else:
                low, high = e2m1_numbers(word & 15), e2m1_numbers((word >> 4) & 15)
            low_sums += low * _input(low_a, low_b, index)[None, :]
            high_sums += high * _input(high_a, high_b, index)[None, :]
    return low_sums, high_sums


@triton.jit
def e2m1_numbers(bits: tl.tensor) -> tl.tensor:
    """Return numbers in e2m1 as float32."""
    exponent = (bits >> 1) & 3
    digit = (bits & 1).to(tl.float32) * 0.5
    power = tl.exp2(tl.maximum(exponent, 1).to(tl.float32) - 1.0)
    number = tl.where(exponent > 0, 1.0 + digit, digit) * power
    return tl.where(bits >= 8, -number, number)


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
    """Return sums, `[columns, tile / vector]` float32, with the products of `weight_vectors`.

    `first`, `tile` and `vector` are elements of weights, or words. `kind` is "plain"; "fp8", with
    `num_scales` of each column, float32 `[num_columns, num_scales]`, that count here if there are
    several; "int4", with words of `scale_words`, `[num_scales, num_columns]`; or "mxfp4", with
    exponents uint8 of that shape. A byte of the latter has two numbers, whose inputs are `half`
    apart. `size` is that of the row. Columns from `num_columns` on have no scales. `unpacks` is
    false for Triton's interpreter.
    """
    starts = first + tl.arange(0, tile // vector) * vector
    if kind == "plain":
        inputs = _inputs(x, starts, size, vector)
        sums += tl.sum(values.to(tl.float32) * inputs[None, :, :], axis=2)
    elif kind == "fp8":
        starts *= 4
        products = _fp8_products(values, x, starts, size, unpacks)
        if num_scales > 1:
            blocks = starts // (size // num_scales)
            # Transposed, so that a thread gets those of its vectors.
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
        if kind == "int4":
            low_scale, _ = scale_and_zero(low_words)
            high_scale, _ = scale_and_zero(high_words)
        else:
            # The exponent of a float32 has the same bias.
            low_scale = (low_words.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            high_scale = (high_words.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        low_sums, high_sums = _nibble_products(
            values, x, starts, low_words & 255, high_words & 255, kind, size, half, unpacks
        )
        sums += low_sums * low_scale + high_sums * high_scale
    return sums
