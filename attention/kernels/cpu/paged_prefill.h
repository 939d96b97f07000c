/* What paged_prefill.c and paged_prefill_amx.c share. */
#include <math.h>
#include <stdlib.h>

#include "fp8.h"
#include "paged_shape.h"

#define KEYS (2 * LANES) /* keys at a time */

/* The first query of a work item, and its sequence. */
typedef struct {
    int32_t sequence, first_query;
} Item;

INLINE int64_t rounded_up(int64_t size, int64_t part) { return (size + part - 1) / part * part; }

/* Takes bytes from `memory`, which is aligned to whole lines, and stays so. */
INLINE void *take(char **memory, int64_t num_bytes) {
    char *taken = *memory;
    *memory += rounded_up(num_bytes, LINE);
    return taken;
}

/* Transposes LANES vectors; `to` has rows of KEYS. */
#ifdef __AVX512F__
INLINE void transpose(const Floats from[LANES], float *to) {
    __m512 a[LANES], b[LANES];
    for (int i = 0; i < LANES; i += 2) {
        a[i] = _mm512_unpacklo_ps((__m512)from[i], (__m512)from[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps((__m512)from[i], (__m512)from[i + 1]);
    }
#define PAIRS(x, y, part) \
    _mm512_castpd_ps(     \
        _mm512_unpack##part##_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)))
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = PAIRS(a[i + j], a[i + j + 2], lo);
            b[i + 2 * j + 1] = PAIRS(a[i + j], a[i + j + 2], hi);
        }
#undef PAIRS
    for (int i = 0; i < LANES; i += 8)
        for (int j = 0; j < 4; j++) {
            a[i + j] = _mm512_shuffle_f32x4(b[i + j], b[i + j + 4], 0x88);
            a[i + j + 4] = _mm512_shuffle_f32x4(b[i + j], b[i + j + 4], 0xdd);
        }
    for (int i = 0; i < LANES / 2; i++) {
        _mm512_storeu_ps(to + i * KEYS, _mm512_shuffle_f32x4(a[i], a[i + 8], 0x88));
        _mm512_storeu_ps(to + (i + 8) * KEYS, _mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd));
    }
}
#else
INLINE void transpose(const Floats from[LANES], float *to) {
    __m256 a[LANES], b[LANES];
    for (int i = 0; i < LANES; i += 2) {
        a[i] = _mm256_unpacklo_ps((__m256)from[i], (__m256)from[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps((__m256)from[i], (__m256)from[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
            b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
        }
    for (int i = 0; i < LANES / 2; i++) {
        _mm256_storeu_ps(to + i * KEYS, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * KEYS, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
    }
}
#endif
