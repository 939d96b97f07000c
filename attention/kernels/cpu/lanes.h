/* Vectors of floats, conversions of float and bfloat16 elements, and functions of vectors. */
#ifndef PAGEDRAY_LANES_H
#define PAGEDRAY_LANES_H

#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

/* The floats of a register. Compilers make slow code of longer vectors. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define LINE 64
#define INLINE static inline __attribute__((always_inline))

/* ORDERED(sum) is a sum that the compiler does not reassociate with what is added to it later. */
#ifndef __has_builtin
#define __has_builtin(name) 0
#endif
#if __has_builtin(__builtin_assoc_barrier)
#define ORDERED(sum) __builtin_assoc_barrier(sum)
#elif __has_builtin(__arithmetic_fence)
#define ORDERED(sum) __arithmetic_fence(sum)
#else
#define ORDERED(sum) (sum)
#endif

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE Floats load_float(const float *from) { return *(const Floats *)from; }

INLINE Floats load_bfloat(const uint16_t *from) {
#ifdef __AVX512F__
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return (Floats)_mm512_slli_epi32(words, 16);
#elif defined(__AVX2__)
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return (Floats)_mm256_slli_epi32(words, 16);
#else
    return (Floats)(__builtin_convertvector(*(const Halves *)from, Words) << 16);
#endif
}

INLINE float one_float(const float *from) { return *from; }

INLINE float one_bfloat(const uint16_t *from) {
    uint32_t word = (uint32_t)*from << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

INLINE void store_float(float *to, float value) { *to = value; }

INLINE void store_bfloat(uint16_t *to, float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    /* Round to nearest, ties to even; NaN stays NaN. */
    *to = value != value ? 0x7fc0 : (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

INLINE void store_all_float(float *to, Floats values) { *(Floats *)to = values; }

/* Stores words below 2^16. */
INLINE void store_lower(uint16_t *to, Words words) {
#if LANES == 16
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)words));
#elif LANES == 8
    const __m128i upper = _mm256_extracti128_si256((__m256i)words, 1);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)words), upper);
    _mm_storeu_si128((__m128i *)to, halves);
#else
    *(Halves *)to = __builtin_convertvector(words, Halves);
#endif
}

/* What store_bfloat does for each value. */
INLINE void store_all_bfloat(uint16_t *to, Floats values) {
#ifdef __AVX512BF16__
    /* The instruction rounds all but NaN and subnormal numbers alike. */
    if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)values, 0x81 | 0x20), 1)) {
        const __m256bh rounded = _mm512_cvtneps_pbh((__m512)values);
        memcpy(to, &rounded, sizeof rounded);
        return;
    }
#endif
    const Words words = (Words)values, is_nan = (Words)(values != values);
    const Words rounded = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
    store_lower(to, (rounded & ~is_nan) | (is_nan & 0x7fc0));
}

/* sums + x * y, as one instruction if there is one, which the compiler does not reassociate. */
INLINE Floats add_product(Floats sums, Floats x, Floats y) {
#ifdef __AVX512F__
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sums);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sums);
#else
    return ORDERED(sums + x * y);
#endif
}

/*
 * A step of a dot product: the elements of two vectors, in an order that is the same for all
 * operands. `add_step` adds the products with another operand lane by lane.
 */
typedef struct {
    Floats first, second;
} Pair;

INLINE Floats add_pairs(Floats sums, Pair x, Pair y) {
    return add_product(add_product(sums, x.first, y.first), x.second, y.second);
}

typedef Pair Step_float;

INLINE Step_float step_float(const float *from) {
    return (Pair){load_float(from), load_float(from + LANES)};
}

INLINE Floats add_step_float(Floats sums, Step_float x, Step_float y) {
    return add_pairs(sums, x, y);
}

#ifdef __AVX512BF16__
typedef __m512bh Step_bfloat;

INLINE Step_bfloat step_bfloat(const uint16_t *from) {
    return (__m512bh)_mm512_loadu_si512(from);
}

INLINE Floats add_step_bfloat(Floats sums, Step_bfloat x, Step_bfloat y) {
    return (Floats)_mm512_dpbf16_ps((__m512)sums, x, y);
}
#else
typedef Pair Step_bfloat;

INLINE Step_bfloat step_bfloat(const uint16_t *from) {
    /* A word holds two elements: shift the lower one up, and mask the upper one. */
    const Words words = *(const Words *)from;
    return (Pair){(Floats)(words << 16), (Floats)(words & 0xffff0000u)};
}

INLINE Floats add_step_bfloat(Floats sums, Step_bfloat x, Step_bfloat y) {
    return add_pairs(sums, x, y);
}
#endif

typedef float Four __attribute__((vector_size(16), aligned(4)));

/* The sum of the quarters, or halves, of a vector. */
INLINE Four folded(Floats x) {
    Four parts[LANES / 4];
    memcpy(parts, &x, sizeof x);
#if LANES == 16
    return (parts[0] + parts[2]) + (parts[1] + parts[3]);
#elif LANES == 8
    return parts[0] + parts[1];
#else
    return parts[0];
#endif
}

INLINE float sum_of(Floats x) {
    const Four four = folded(x);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

INLINE Floats larger(Floats x, Floats y) {
#ifdef __AVX512F__
    return (Floats)_mm512_max_ps((__m512)y, (__m512)x);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)y, (__m256)x);
#else
    const Ints is_less = x < y;
    return (Floats)(((Ints)y & is_less) | ((Ints)x & ~is_less));
#endif
}

INLINE float largest_of(Floats x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX2__)
    const __m128 half = _mm_max_ps(
        _mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
#else
    float largest = x[0];
    for (int i = 1; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

INLINE void sums_of_four(Floats a, Floats b, Floats c, Floats d, float sums[4]) {
#ifdef __AVX2__
    const __m128 all = _mm_hadd_ps(
        _mm_hadd_ps((__m128)folded(a), (__m128)folded(b)),
        _mm_hadd_ps((__m128)folded(c), (__m128)folded(d)));
    _mm_storeu_ps(sums, all);
#else
    sums[0] = sum_of(a);
    sums[1] = sum_of(b);
    sums[2] = sum_of(c);
    sums[3] = sum_of(d);
#endif
}

/* e^x for x <= 0, relative error 2e-7: 2^n times a polynomial on [-ln2/2, ln2/2]. 0 below -87. */
INLINE Floats exp_below_zero(Floats x) {
#ifdef __AVX512F__
    const Floats n = (Floats)_mm512_roundscale_ps(
        (__m512)(x * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Floats lowest = (Floats){0} - 87.0f;
    const Ints is_low = x < lowest;
    x = (Floats)(((Ints)lowest & is_low) | ((Ints)x & ~is_low));
    /* Truncation, since n <= 0: the nearest. */
    const Ints whole = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, Ints);
    const Floats n = __builtin_convertvector(whole, Floats);
#endif
    const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = (Floats){0} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
#ifdef __AVX512F__
    const __mmask16 is_kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return (Floats)_mm512_maskz_scalef_ps(is_kept, (__m512)p, (__m512)n);
#else
    return (Floats)((Ints)(p * (Floats)((whole + 127) << 23)) & ~is_low);
#endif
}

/* tanh x, absolute error 2e-7. */
INLINE Floats tanh_of(Floats x) {
    const Ints sign = (Ints){0} + INT32_MIN;
    const Floats small = exp_below_zero((Floats)((Ints)(x + x) | sign));
    const Floats one = (Floats){0} + 1.0f;
    return (Floats)((Ints)((one - small) / (one + small)) | ((Ints)x & sign));
}

/* x / (1 + e^-x) */
INLINE Floats silu_of(Floats x) {
    const Ints sign = (Ints){0} + INT32_MIN;
    const Floats small = exp_below_zero((Floats)((Ints)x | sign));
    const Floats one = (Floats){0} + 1.0f, below = small + one;
#ifdef __AVX512F__
    /* A step of Newton's method: a division takes many cycles. */
    const Floats about = (Floats)_mm512_rcp14_ps((__m512)below);
    const Floats inverse = about * (2.0f - below * about);
    const __mmask16 is_negative = _mm512_cmp_ps_mask((__m512)x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return x * (Floats)_mm512_mask_mov_ps((__m512)one, is_negative, (__m512)small) * inverse;
#else
    const Ints is_negative = x < 0.0f;
    return x * (Floats)(((Ints)small & is_negative) | ((Ints)one & ~is_negative)) / below;
#endif
}

#endif
