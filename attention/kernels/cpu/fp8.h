/* Conversion of fp8 values (e4m3 and e5m2) to floats. */
#ifndef PAGEDRAY_FP8_H
#define PAGEDRAY_FP8_H

#include "lanes.h"

typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

#ifdef __AVX512F__
/* By way of float16, whose exponent is that of e5m2 and wider than that of e4m3. */
INLINE Floats load_e4m3(const uint8_t *from) {
    const __m256i signed_bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
    const __m256i halves =
        _mm256_and_si256(_mm256_slli_epi16(signed_bytes, 7), _mm256_set1_epi16((int16_t)0xbfff));
    const __m512 floats = _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0f));
    /* All ones would be 480, but encode NaN. */
    const __mmask16 is_none =
        _mm512_cmpeq_ps_mask(_mm512_abs_ps(floats), _mm512_set1_ps(480.0f));
    return (Floats)_mm512_mask_mov_ps(floats, is_none, _mm512_set1_ps(__builtin_nanf("")));
}

INLINE Floats load_e5m2(const uint8_t *from) {
    const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
    return (Floats)_mm512_cvtph_ps(_mm256_slli_epi16(bytes, 8));
}
#else
INLINE Words choose(Ints is_first, Words first, Words second) {
    return (first & (Words)is_first) | (second & ~(Words)is_first);
}

/*
 * Converts finite values with `mantissa` bits of mantissa and an exponent bias of `bias`;
 * subnormals are multiples of `unit`.
 */
INLINE Words number_of(Words size, const int mantissa, const uint32_t bias, const float unit) {
    const Words normal = (size << (23 - mantissa)) + ((127 - bias) << 23);
    const Words small = (Words)(__builtin_convertvector((Ints)size, Floats) * unit);
    return choose((Ints)size < (1 << mantissa), small, normal);
}

/* Four bits of exponent and three of mantissa; all ones is NaN, and there is no infinity. */
INLINE Floats load_e4m3(const uint8_t *from) {
    const Words bytes = __builtin_convertvector(*(const Bytes *)from, Words);
    const Words size = bytes & 0x7f, none = (Words){} + 0x7fc00000u;
    const Words number = choose((Ints)size == 0x7f, none, number_of(size, 3, 7, 0x1p-9f));
    return (Floats)(number | (bytes & 0x80) << 24);
}

/* Five bits of exponent and two of mantissa: the upper byte of a float16. */
INLINE Floats load_e5m2(const uint8_t *from) {
    const Words bytes = __builtin_convertvector(*(const Bytes *)from, Words);
    const Words size = bytes & 0x7f, endless = (size << 21) | 0x7f800000u;
    const Words number = choose((Ints)size >= 0x7c, endless, number_of(size, 2, 15, 0x1p-16f));
    return (Floats)(number | (bytes & 0x80) << 24);
}
#endif

INLINE void store_floats_float(float *to, Floats values) { *(Floats *)to = values; }

/* Exact, since the lower half of a float that was fp8 is zero. */
INLINE void store_floats_bfloat(uint16_t *to, Floats values) {
    store_lower(to, (Words)values >> 16);
}

#endif
