/*
 * Copies weights and finds out whether all of them are finite, in one pass: a second one would take
 * half as long again. Called by copy_finite in finite_copy.py.
 */
#include <stdint.h>

/* Values that a thread copies at a time. */
#define BLOCK 65536

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
