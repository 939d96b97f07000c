/*
 * Attention of decodes over the paged cache, on the CPU, without gathering blocks.
 *
 * Each key and value is read once, where it lies, for all query heads of its group; the softmax
 * is kept up to date block by block (Milakov and Gimelshein, 2018). Blocks to come are fetched
 * ahead by software, into the second cache: the first has no room for as much as memory's delay
 * asks for, and a core left to its own devices reads at half the rate. Blocks of fp8 numbers are
 * widened, exactly, one KV head at a time, into the first cache, and read from there.
 */
#include <math.h>
#include <omp.h>

#include "fp8.h"

#define MAX_BLOCK 256
#define ROW (MAX_BLOCK + LANES) /* scores are written and weighed by whole vectors */
#define STEP (2 * LANES)
#define GROUP 4 /* query heads at a time */
#define WIDE 4  /* vectors of a value at a time */

/* What the cache holds: elements as those of queries, or fp8. */
enum { SAME, E4M3, E5M2 };

typedef struct {
    int64_t num_sequences;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_size;
    int64_t block_size;
    int64_t block_stride; /* elements from a block to the next */
    int64_t value_offset; /* elements from a key to its value */
    int64_t table_stride; /* entries from a block table to the next */
    int64_t query_stride; /* elements from a query row to the next */
    int64_t out_stride;
    int64_t window; /* keys that a query sees, its own included; 0 is all */
    int64_t format;
    float scale;
    float value_scale;
    float soft_cap; /* 0 is none */
} Shape;

/* Which keys of a block are seen: `first` to before `stop`; key k is at k + offset from the query. */
typedef struct {
    int64_t first, stop, offset;
} Span;

/* The largest score that a head has met, and the sum of its weights relative to that. */
typedef struct {
    float top, sum;
} Softmax;

/* From products of queries and keys to scores, with scale, soft cap and ALiBi. */
INLINE void adjust(const Shape *shape, float *scores, const float *slope, Span span) {
    for (int64_t key = 0; key < span.stop; key += LANES)
        *(Floats *)(scores + key) *= shape->scale;
    if (shape->soft_cap > 0.0f)
        for (int64_t key = span.first; key < span.stop; key++)
            scores[key] = shape->soft_cap * tanhf(scores[key] / shape->soft_cap);
    if (slope)
        for (int64_t key = span.first; key < span.stop; key++)
            scores[key] += *slope * (float)(key + span.offset);
}

INLINE float top_of(const float *scores, int64_t stop) {
    Floats tops = load_float(scores);
    for (int64_t key = LANES; key < stop; key += LANES)
        tops = larger(tops, load_float(scores + key));
    return largest_of(tops);
}

/* Weights in place of scores; returns their sum. */
INLINE float weigh(float *scores, int64_t stop, float top) {
    Floats sum = {0};
    for (int64_t key = 0; key < stop; key += LANES) {
        const Floats weights = exp_below_zero(load_float(scores + key) - top);
        *(Floats *)(scores + key) = weights;
        sum += weights;
    }
    return sum_of(sum);
}

/* As many KV heads as leave enough work for every thread; those of one sequence cost the same. */
INLINE int64_t kv_heads_at_once(const Shape *shape) {
    const int64_t num_threads = omp_get_max_threads();
    const int64_t wanted = shape->num_sequences == 1 ? num_threads : 4 * num_threads;
    const int64_t num_parts = (wanted + shape->num_sequences - 1) / shape->num_sequences;
    return (shape->num_kv_heads + num_parts - 1) / num_parts;
}

INLINE void fetch(const void *from, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += LINE) __builtin_prefetch((const char *)from + i, 0, 2);
}

/* Begins to read a block's keys and values of one KV head. */
INLINE void fetch_block(const Shape *shape, int64_t row_bytes, const char *keys) {
    const char *values = keys + shape->value_offset * (row_bytes / shape->head_size);
    for (int64_t key = 0; key < shape->block_size; key++) {
        fetch(keys + key * shape->num_kv_heads * row_bytes, row_bytes);
        fetch(values + key * shape->num_kv_heads * row_bytes, row_bytes);
    }
}

/* Bytes of an element of the cache, beside queries with elements of `width` bytes. */
INLINE int64_t width_of(const Shape *shape, int64_t width) {
    return shape->format == SAME ? width : 1;
}

#define ELEMENT float
#define NAME(x) x##_float
#include "paged_decode_body.h"
#undef ELEMENT
#undef NAME

#define ELEMENT uint16_t
#define NAME(x) x##_bfloat
#include "paged_decode_body.h"
