/* Vectors of floats, and how float and bfloat16 elements become them. */
#ifndef PAGEDRAY_LANES_H
#define PAGEDRAY_LANES_H

#include <stdint.h>
#include <string.h>

#define LANES 16
#define LINE 64

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

static inline Floats load_float(const float *from) { return *(const Floats *)from; }

static inline Floats load_bfloat(const uint16_t *from) {
    return (Floats)(__builtin_convertvector(*(const Halves *)from, Words) << 16);
}

/* Two vectors of elements, in whatever order; the same order for every row. */
typedef struct {
    Floats first, second;
} Pair;

static inline Pair pair_float(const float *from) {
    return (Pair){load_float(from), load_float(from + LANES)};
}

static inline Pair pair_bfloat(const uint16_t *from) {
    /* A word holds two elements: the lower one shifted up, the upper one where it is. */
    const Words words = *(const Words *)from;
    return (Pair){(Floats)(words << 16), (Floats)(words & 0xffff0000u)};
}

static inline float one_float(const float *from) { return *from; }

static inline float one_bfloat(const uint16_t *from) {
    uint32_t word = (uint32_t)*from << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

static inline void store_float(float *to, float value) { *to = value; }

static inline void store_bfloat(uint16_t *to, float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    /* Round to nearest, ties to even; what is not a number stays so. */
    *to = value != value ? 0x7fc0 : (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

static inline float sum_of(Floats x) {
    typedef float Eight __attribute__((vector_size(32), aligned(4)));
    typedef float Four __attribute__((vector_size(16), aligned(4)));
    Eight halves[2];
    memcpy(halves, &x, sizeof x);
    Eight eight = halves[0] + halves[1];
    Four quarters[2];
    memcpy(quarters, &eight, sizeof eight);
    Four four = quarters[0] + quarters[1];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

#endif
