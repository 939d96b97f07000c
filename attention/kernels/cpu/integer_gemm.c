/*
 * GEMM with a weight of small integers on the CPU, for inputs in bfloat16:
 * out[m][n] = sum_g (scale[n][g] * sum_{k in g} x[m][k] * number[n][k]
 *                   + minimum[n][g] * sum_{k in g} x[m][k]) + bias[n],
 * where g is a group of inputs.
 *
 * The weight is packed into tiles of TILE output columns. A word has several numbers of
 * one column, and a vector of words those of neighboring columns. Numbers become bfloat16 or float,
 * which is exact: in registers for a few rows, which are therefore limited by the bandwidth of the
 * memory, and in a buffer that all rows read otherwise.
 *
 * Each sum is taken by one lane in the order of k, piece by piece: a row of the result depends
 * neither on the other rows of the batch nor on the number of threads.
 */
#include <omp.h>

#include "lanes.h"

#define TILE 64
#define PIECE 128    /* inputs, at most, that are added up before they are scaled */
#define MOST_ROWS 96 /* rows of x in one pass over the tiles */

/* MICRO_ROWS is the largest number of rows whose sums stay in registers. */
#if defined(__AVX512F__)
#define WIDTH 16
#define MICRO_ROWS 6
#define EACH_HEIGHT(do) do(1) do(2) do(3) do(4) do(5) do(6)
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define WIDTH 8
#define MICRO_ROWS 3
#define EACH_HEIGHT(do) do(1) do(2) do(3)
#else
#define WIDTH 4
#define MICRO_ROWS 3
#define EACH_HEIGHT(do) do(1) do(2) do(3)
#endif
#define VECTORS 4                        /* that are added up at a time */
#define STRIPS (TILE / (WIDTH * VECTORS)) /* of a tile */

typedef float Part __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t PartInts __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t PartWords __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint16_t PartHalves __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

typedef struct {
    int64_t num_rows;
    int64_t in_size;
    int64_t out_size; /* of the result; a gated weight has twice as many */
    int64_t x_stride;
    int64_t group_size;
    int64_t is_gated; /* out = silu(first half of the columns) * second half */
} Shape;

/*
 * A packed weight: `[tiles][in_size / numbers of a word][TILE]` words, and `[tiles][groups][TILE]`
 * scales in float16 and minimums. A minimum is added to each value of a group; null stands for 0.
 */
typedef struct {
    const void *words;
    const uint16_t *scales;
    const float *minimums;
    const uint16_t *bias;
} Weight;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t num_parts_of(int64_t size, int64_t part) { return (size + part - 1) / part; }

/* sums + x * y, as one instruction if there is one, which the compiler does not reassociate. */
INLINE Part add_scaled(Part sums, Part x, Part y) {
#if defined(__AVX512F__)
    return (Part)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sums);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Part)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sums);
#else
    return ORDERED(sums + x * y);
#endif
}

/*
 * Two numbers of each of some columns, for two inputs of a row: `add_numbers` adds their products.
 */
#ifdef __AVX512BF16__
typedef __m512i Numbers;
typedef uint32_t Inputs;

INLINE Inputs inputs_of(const uint16_t *from) {
    Inputs pair;
    memcpy(&pair, from, sizeof pair);
    return pair;
}

INLINE Part add_numbers(Part sums, Numbers numbers, Inputs x) {
    return (Part)_mm512_dpbf16_ps(
        (__m512)sums, (__m512bh)numbers, (__m512bh)_mm512_set1_epi32((int)x));
}
#else
typedef struct {
    Part lower, upper;
} Numbers;
typedef struct {
    float lower, upper;
} Inputs;

INLINE Inputs inputs_of(const uint16_t *from) {
    return (Inputs){one_bfloat(from), one_bfloat(from + 1)};
}

INLINE Part add_numbers(Part sums, Numbers numbers, Inputs x) {
    sums = add_scaled(sums, numbers.lower, (Part){} + x.lower);
    return add_scaled(sums, numbers.upper, (Part){} + x.upper);
}
#endif

INLINE Part load_halves(const uint16_t *from) {
#if defined(__AVX512F__)
    return (Part)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif WIDTH == 8 && defined(__F16C__)
    return (Part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    /* The exponents of a float16 and a float differ by 112. */
    const PartWords bits = __builtin_convertvector(*(const PartHalves *)from, PartWords);
    const Part magnitude = (Part)((bits & 0x7fff) << 13) * 0x1p112f;
    return (Part)((PartWords)magnitude | (bits & 0x8000) << 16);
#endif
}

/*
 * The sum of some inputs. It is not inlined, so that the compiler, which may reassociate it, does so
 * in one way for all numbers of rows.
 */
static __attribute__((noinline)) float sum_of_inputs(const uint16_t *x, int64_t size) {
    Floats sums = {0};
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) sums += load_bfloat(x + k);
    float rest = 0;
    for (; k < size; k++) rest += one_bfloat(x + k);
    return sum_of(sums) + rest;
}

/* Four bits, less 8: a word has those of eight inputs of a column, odd inputs in the upper half. */
#define PER_WORD_int4 8
typedef uint32_t Word_int4;

INLINE Numbers numbers_int4(const Word_int4 *from, const int pair) {
    const PartWords words = *(const PartWords *)from;
#ifdef __AVX512BF16__
    /* The permutation reads five bits of each index, the highest of which is of another number. */
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        (short)0xc100, (short)0xc0e0, (short)0xc0c0, (short)0xc0a0, (short)0xc080, (short)0xc040,
        (short)0xc000, (short)0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0));
    return _mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)words, 4 * pair), table);
#else
    const PartInts lower = (PartInts)(words >> (4 * pair) & 15) - 8;
    const PartInts upper = (PartInts)(words >> (16 + 4 * pair) & 15) - 8;
    return (Numbers){
        __builtin_convertvector(lower, Part), __builtin_convertvector(upper, Part)};
#endif
}

/* Eight bits: a word has those of two inputs of a column. */
#define PER_WORD_int8 2
typedef uint16_t Word_int8;

INLINE Numbers numbers_int8(const Word_int8 *from, const int pair) {
    (void)pair;
#ifdef __AVX512BF16__
    const __m128i *bytes = (const __m128i *)from;
    const __m512i lower = _mm512_cvtepi8_epi32(_mm_loadu_si128(bytes));
    const __m512i upper = _mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1));
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(upper), _mm512_cvtepi32_ps(lower));
#else
    const PartWords words = __builtin_convertvector(*(const PartHalves *)from, PartWords);
    const PartInts lower = (PartInts)(words << 24) >> 24, upper = (PartInts)(words << 16) >> 24;
    return (Numbers){
        __builtin_convertvector(lower, Part), __builtin_convertvector(upper, Part)};
#endif
}

#define NAME(x) x##_int4
#include "integer_gemm_body.h"
#undef NAME

#define NAME(x) x##_int8
#include "integer_gemm_body.h"
