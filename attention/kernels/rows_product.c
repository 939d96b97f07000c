/*
 * Products of few rows with a weight, on the CPU: out[m][n] = sum_k x[m][k] * weight[n][k].
 *
 * With few rows all that matters is how fast the weight streams past. Each thread reads four runs
 * of weight rows at once and fetches each ahead by software, which doubles what a core left to
 * itself gets from memory.
 */
#include <math.h>
#include <omp.h>

#include "lanes.h"

#define STREAMS 4 /* as many as sums_of_four takes */
#define GROUP 4 /* rows of x at a time; a weight row stays in the first cache meanwhile */
#define AHEAD 2048

typedef struct {
    int64_t num_rows;
    int64_t in_size;
    int64_t out_size; /* of the result; a gated weight has twice as many rows */
    int64_t x_stride;
    int64_t is_gated; /* out = silu(first half of the rows) * second half */
} Shape;

INLINE float silu(float x) { return x / (1.0f + expf(-x)); }

#define ELEMENT float
#define NAME(x) x##_float
#include "rows_product_body.h"
#undef ELEMENT
#undef NAME

#define ELEMENT uint16_t
#define NAME(x) x##_bfloat
#include "rows_product_body.h"
