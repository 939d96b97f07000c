/*
 * Attention of decodes over the paged cache, on the CPU, without gathering blocks.
 *
 * Each key and value is read once for all query heads of its KV head; the softmax is computed
 * online, block by block (Milakov and Gimelshein, 2018). Software prefetches the first block and
 * each next one into L2, because L1 cannot hold enough lines to hide the latency of memory; the
 * hardware prefetcher alone reaches half the bandwidth. Blocks of fp8 values are widened, exactly,
 * one KV head at a time, into a buffer that stays in L1.
 */
#include <math.h>
#include <omp.h>

#include "fp8.h"
#include "paged_shape.h"

#define MAX_BLOCK 256
#define ROW (MAX_BLOCK + LANES) /* scores of a head, processed in whole vectors */
#define STEP (2 * LANES)
#define HEADS 4 /* query heads at a time */
#define WIDE 4  /* vectors of a value at a time */

/* The visible keys of a block, `first` to `stop` - 1; key k is at k + offset from the query. */
typedef struct {
    int64_t first, stop, offset;
} Span;

/* The largest score of a head so far, and the sum of its weights relative to that. */
typedef struct {
    float top, sum;
} Softmax;

/* Applies scale, soft cap and ALiBi to products of queries and keys. */
INLINE void adjust(const Shape *shape, float *scores, const float *slope, Span span) {
    for (int64_t key = 0; key < span.stop; key += LANES)
        *(Floats *)(scores + key) *= shape->scale;
    if (shape->soft_cap > 0.0f)
        for (int64_t key = 0; key < span.stop; key += LANES) {
            const Floats given = load_float(scores + key);
            const Floats capped = tanh_of(given / shape->soft_cap) * shape->soft_cap;
            const Ints is_hidden = given == -INFINITY;
            *(Floats *)(scores + key) =
                (Floats)(((Ints)given & is_hidden) | ((Ints)capped & ~is_hidden));
        }
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

/* Replaces scores by weights and returns their sum. */
INLINE float weigh(float *scores, int64_t stop, float top) {
    Floats sum = {0};
    for (int64_t key = 0; key < stop; key += LANES) {
        const Floats weights = exp_below_zero(load_float(scores + key) - top);
        *(Floats *)(scores + key) = weights;
        sum += weights;
    }
    return sum_of(sum);
}

/* The most KV heads per work item that still give every thread enough items. */
INLINE int64_t kv_heads_at_once(const Shape *shape) {
    const int64_t num_threads = omp_get_max_threads();
    const int64_t wanted = shape->num_sequences == 1 ? num_threads : 4 * num_threads;
    const int64_t num_parts = (wanted + shape->num_sequences - 1) / shape->num_sequences;
    return (shape->num_kv_heads + num_parts - 1) / num_parts;
}

INLINE void fetch(const void *from, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += LINE) __builtin_prefetch((const char *)from + i, 0, 2);
}

/* The keys of one KV head of a block, whose elements have `width` bytes. */
INLINE const char *keys_of(
    const Shape *shape, const char *cache, int64_t block, int64_t kv, int64_t width) {
    return cache + (block * shape->block_stride + kv * shape->head_size) * width;
}

/* Prefetches the keys and values of one KV head of a block. */
INLINE void fetch_block(const Shape *shape, const char *keys, int64_t width) {
    const char *values = keys + shape->value_offset * width;
    const int64_t row_bytes = shape->head_size * width;
    for (int64_t key = 0; key < shape->block_size; key++) {
        fetch(keys + key * shape->num_kv_heads * row_bytes, row_bytes);
        fetch(values + key * shape->num_kv_heads * row_bytes, row_bytes);
    }
}

#define ELEMENT float
#define NAME(x) x##_float
#include "paged_decode_body.h"
#undef ELEMENT
#undef NAME

#define ELEMENT uint16_t
#define NAME(x) x##_bfloat
#include "paged_decode_body.h"
