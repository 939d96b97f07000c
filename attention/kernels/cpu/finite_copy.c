/*
 * Copies weights and finds out whether all of them are finite, in one pass: a second one would take
 * half as long again. Or only finds it out. Called by finite_copy.py, by several threads at a time.
 */
#include <stdint.h>

#define SAME(word) (word)
#define FLOAT_OF_BFLOAT(word) ((uint32_t)(word) << 16)

#define FROM uint16_t
#define TO uint16_t
#define CONVERT SAME
#define NAME copy_finite_16
#include "finite_copy_body.h"
#undef FROM
#undef TO
#undef CONVERT
#undef NAME

#define FROM uint32_t
#define TO uint32_t
#define CONVERT SAME
#define NAME copy_finite_32
#include "finite_copy_body.h"
#undef FROM
#undef TO
#undef CONVERT
#undef NAME

#define FROM uint16_t
#define TO uint32_t
#define CONVERT FLOAT_OF_BFLOAT
#define NAME copy_finite_bfloat_float
#include "finite_copy_body.h"

int64_t are_finite_16(const uint16_t *from, int64_t size, uint32_t exponent) {
    const uint16_t bits = (uint16_t)exponent;
    uint16_t found = 0;
    for (int64_t i = 0; i < size; i++) found |= (uint16_t)((from[i] & bits) == bits);
    return !found;
}

int64_t are_finite_32(const uint32_t *from, int64_t size, uint32_t exponent) {
    uint32_t found = 0;
    for (int64_t i = 0; i < size; i++) found |= (from[i] & exponent) == exponent;
    return !found;
}
