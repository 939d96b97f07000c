/*
 * Attention of prompts, or parts of them, over the paged cache, on the CPU.
 *
 * A work item is a tile of adjacent queries of one sequence and the query heads of one KV head: its
 * rows. It reads KEYS keys at a time, transposes them, so that a vector holds the scores of LANES
 * keys, and computes the softmax online (Milakov and Gimelshein, 2018). The keys that are read
 * together begin at multiples of KEYS, whatever the queries, so a row has the same result in each
 * step that computes it.
 *
 * It needs AVX-512, without which compilers make slow code of vectors of this size: the library is
 * empty then.
 */
#ifdef __AVX512F__
#include <math.h>
#include <stdlib.h>

#include "fp8.h"
#include "paged_shape.h"

#define KEYS (2 * LANES) /* keys at a time */
#define WIDE 4           /* vectors of a value at a time */
/* Rows at a time, so that their sums fit in registers. */
#define ROWS 8
#define VALUE_ROWS 4

/* The first query of a work item, and its sequence. */
typedef struct {
    int32_t sequence, first_query;
} Item;

/* What a work item computes with. Columns after those of the head are zero. */
typedef struct {
    int64_t size;   /* the head size in whole vectors */
    float *queries; /* [rows][size] */
    float *totals;  /* [rows][size]: weighted sums of values */
    float *keys;    /* [size][KEYS] */
    float *values;  /* [KEYS][size] */
    float *weights; /* [rows][KEYS]: scores first */
    float *tops;    /* [rows]: the largest score so far */
    float *sums;    /* [rows]: the sum of weights relative to it */
    float *shrinks; /* [rows]: what the last keys change earlier weights by */
} Room;

/* Transposes 16 vectors of 16 floats; `to` has rows of KEYS. */
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

/* Multiplies some rows by the keys: `scores[row][key]`. */
INLINE void score_rows(
    int64_t size, const float *queries, const float *keys, const int num_rows, float *scores) {
    Floats sums[ROWS][2];
    for (int r = 0; r < num_rows; r++) sums[r][0] = sums[r][1] = (Floats){0};
    for (int64_t i = 0; i < size; i++) {
        const Floats first = load_float(keys + i * KEYS);
        const Floats second = load_float(keys + i * KEYS + LANES);
        for (int r = 0; r < num_rows; r++) {
            const Floats query = (Floats){0} + queries[r * size + i];
            sums[r][0] = add_product(sums[r][0], query, first);
            sums[r][1] = add_product(sums[r][1], query, second);
        }
    }
    for (int r = 0; r < num_rows; r++) {
        store_all_float(scores + r * KEYS, sums[r][0]);
        store_all_float(scores + r * KEYS + LANES, sums[r][1]);
    }
}

/* Adds the weighted values of the first `num_keys` keys to some rows of `totals`. */
INLINE void add_values(
    int64_t size, const float *weights, const float *shrinks, const float *values,
    const int64_t num_keys, const int num_rows, const int num_vectors, float *totals) {
    Floats sums[VALUE_ROWS][WIDE];
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < num_vectors; v++)
            sums[r][v] = load_float(totals + r * size + v * LANES) * shrinks[r];
    for (int64_t key = 0; key < num_keys; key++)
        for (int v = 0; v < num_vectors; v++) {
            const Floats value = load_float(values + key * size + v * LANES);
            for (int r = 0; r < num_rows; r++) {
                const Floats weight = (Floats){0} + weights[r * KEYS + key];
                sums[r][v] = add_product(sums[r][v], weight, value);
            }
        }
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < num_vectors; v++)
            store_all_float(totals + r * size + v * LANES, sums[r][v]);
}

/* Adds the weighted values to all columns of some rows of `totals`. */
INLINE void add_rows(
    const Room *room, int64_t row, const int64_t num_keys, const int num_rows) {
    const float *weights = room->weights + row * KEYS, *shrinks = room->shrinks + row;
    const int64_t size = room->size;
    float *totals = room->totals + row * size;
    int64_t i = 0;
    for (; i + WIDE * LANES <= size; i += WIDE * LANES)
        add_values(
            size, weights, shrinks, room->values + i, num_keys, num_rows, WIDE, totals + i);
    for (; i < size; i += LANES)
        add_values(size, weights, shrinks, room->values + i, num_keys, num_rows, 1, totals + i);
}

/*
 * Replaces the scores of a row by weights. `first` and `last` are the keys that it sees, counted
 * from the first one of the scores.
 */
INLINE void weigh_row(
    const Shape *shape, const Room *room, int64_t row, const float *slope, int32_t first,
    int32_t last) {
    float *scores = room->weights + row * KEYS;
    if (first >= KEYS) {
        /* All keys are before its window. */
        memset(scores, 0, KEYS * sizeof(float));
        room->shrinks[row] = 1.0f;
        return;
    }
    if (shape->soft_cap > 0.0f)
        for (int key = 0; key < KEYS; key += LANES) {
            const Floats capped = tanh_of(load_float(scores + key) / shape->soft_cap);
            store_all_float(scores + key, capped * shape->soft_cap);
        }
    if (slope)
        for (int key = 0; key < KEYS; key++) scores[key] += *slope * (float)(key - last);
    Floats parts[2] = {load_float(scores), load_float(scores + LANES)};
    if (first > 0 || last < KEYS - 1)
        for (int v = 0; v < 2; v++) {
            const Ints keys = (Ints){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} +
                              v * LANES;
            const Ints is_seen = (keys >= first) & (keys <= last);
            const Ints hidden = (Ints)((Floats){0} - INFINITY);
            parts[v] = (Floats)(((Ints)parts[v] & is_seen) | (hidden & ~is_seen));
        }
    const float top = largest_of(larger(parts[0], parts[1]));
    float shrink = 1.0f;
    if (top > room->tops[row]) {
        shrink = room->tops[row] == -INFINITY ? 0.0f : expf(room->tops[row] - top);
        room->tops[row] = top;
    }
    const Floats first_weights = exp_below_zero(parts[0] - room->tops[row]);
    const Floats second_weights = exp_below_zero(parts[1] - room->tops[row]);
    store_all_float(scores, first_weights);
    store_all_float(scores + LANES, second_weights);
    room->shrinks[row] = shrink;
    room->sums[row] = room->sums[row] * shrink + sum_of(first_weights + second_weights);
}

INLINE int64_t whole_vectors(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

INLINE float *take(float **memory, int64_t size) {
    float *taken = *memory;
    *memory += whole_vectors(size);
    return taken;
}

/* Bytes of the room for some rows. */
INLINE int64_t room_bytes(const Shape *shape, int64_t num_rows) {
    const int64_t size = whole_vectors(shape->head_size);
    return (2 * (num_rows + KEYS) * size + num_rows * KEYS + 3 * whole_vectors(num_rows)) *
           (int64_t)sizeof(float);
}

INLINE Room room_in(float *memory, const Shape *shape, int64_t num_rows) {
    const int64_t size = whole_vectors(shape->head_size);
    return (Room){
        .size = size,
        .queries = take(&memory, num_rows * size),
        .totals = take(&memory, num_rows * size),
        .keys = take(&memory, size * KEYS),
        .values = take(&memory, KEYS * size),
        .weights = take(&memory, num_rows * KEYS),
        .tops = take(&memory, num_rows),
        .sums = take(&memory, num_rows),
        .shrinks = take(&memory, num_rows),
    };
}

#define ELEMENT float
#define NAME(x) x##_float
#include "paged_prefill_body.h"
#undef ELEMENT
#undef NAME

#define ELEMENT uint16_t
#define NAME(x) x##_bfloat
#include "paged_prefill_body.h"
#endif
