/*
 * Products of rows with a weight, on the CPU: out[m][n] = sum_k x[m][k] * weight[n][k].
 *
 * The weight lies in panels of PANEL columns of the result, so that each step of a sum, one k or
 * for bfloat16 two, takes one line or two of memory for all of them. A panel is multiplied with
 * all rows while it is in the cache, and meanwhile the next is fetched by software, into the
 * second cache: the first has no room for as much as memory's delay asks for. Few rows thus go at
 * the rate of memory, and many at that of the multipliers.
 *
 * Each sum is taken by one lane in the order of k, chunk by chunk so that it rounds less: a row of
 * the result does not depend on which rows are with it, nor on the number of threads.
 */
#include <omp.h>

#include "lanes.h"

#define PANEL 32
#define GROUP 16     /* steps for which a row of x lies together: a line of floats */
#define CHUNK 32     /* groups of a panel that all rows meet before the next */
#define UNAIDED 2    /* rows so few that the hardware fetches ahead better than software */
#define MOST_ROWS 96 /* that a panel meets in one pass */
#define X_BYTES (2 * 1024 * 1024)

/* As many rows at a time as leave their sums in the registers. */
#if defined(__AVX512F__)
#define WIDTH 16
#define TILE_ROWS 12
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define WIDTH 8
#define TILE_ROWS 3
#else
#define WIDTH 4
#define TILE_ROWS 3
#endif
#define VECTORS (PANEL / WIDTH)

typedef float Part __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t PartWords __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

typedef struct {
    int64_t num_rows;
    int64_t in_size;
    int64_t out_size; /* of the result; a gated weight has twice as many */
    int64_t x_stride;
    int64_t is_gated; /* out = silu(first half of the columns) * second half */
} Shape;

typedef struct {
    int64_t begin, end;
} Range;

/* Part `index` of `num_parts` that differ by one at most. */
INLINE Range part_of(int64_t size, int64_t num_parts, int64_t index) {
    return (Range){size * index / num_parts, size * (index + 1) / num_parts};
}

/* How the work is cut. */
typedef struct {
    int64_t num_groups; /* of a panel */
    int64_t num_panels; /* of the result */
    int64_t tile_rows;  /* at most, of a tile */
    int64_t pass_rows;  /* as many as `x_units` has room for */
} Layout;

/* What a thread does. */
typedef struct {
    Range rows, panels;
} Share;

/* The rows of x for a pass. Each thread has its own copy, so that none waits for another. */
static _Thread_local char x_units[X_BYTES] __attribute__((aligned(LINE)));

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t num_parts_of(int64_t size, int64_t part) { return (size + part - 1) / part; }

INLINE Layout layout_of(const Shape *shape, int64_t step, int64_t unit_bytes) {
    const int64_t num_groups = num_parts_of(shape->in_size, GROUP * step);
    const int64_t most_rows = X_BYTES / (num_groups * GROUP * unit_bytes);
    const int64_t tile_rows = smaller(most_rows, TILE_ROWS);
    return (Layout){
        .num_groups = num_groups,
        .num_panels = num_parts_of(shape->out_size, PANEL),
        .tile_rows = tile_rows,
        .pass_rows = smaller(most_rows, MOST_ROWS) / tile_rows * tile_rows,
    };
}

/*
 * Threads share out the panels. Where rows suffice for several passes they share out the rows, so
 * as not to lay out the same ones, and where there are more threads than panels, rows as well.
 */
INLINE Share share_of(
    const Shape *shape, const Layout *layout, int64_t num_threads, int64_t thread) {
    const int64_t num_passes = shape->num_rows / layout->pass_rows;
    const int64_t crowd = smaller(num_threads / layout->num_panels, shape->num_rows);
    int64_t num_parts = smaller(num_passes > crowd ? num_passes : crowd, num_threads);
    while (num_parts > 1 && num_threads % num_parts) num_parts--;
    if (num_parts < 1) num_parts = 1;
    return (Share){
        .rows = part_of(shape->num_rows, num_parts, thread % num_parts),
        .panels = part_of(layout->num_panels, num_threads / num_parts, thread / num_parts),
    };
}

/* sums + x * y in one operation, which the compiler may not take apart to sum in another order. */
INLINE Part add_scaled(Part sums, Part x, float y) {
#if defined(__AVX512F__)
    return (Part)_mm512_fmadd_ps((__m512)x, _mm512_set1_ps(y), (__m512)sums);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Part)_mm256_fmadd_ps((__m256)x, _mm256_set1_ps(y), (__m256)sums);
#else
    return sums + x * y;
#endif
}

/* What a step takes of a row of x, and how it adds to sums its products with a part of a panel. */
typedef float Unit_float;
#define STEP_float 1

INLINE Part add_unit_float(Part sums, const float *weight, Unit_float x) {
    return add_scaled(sums, *(const Part *)weight, x);
}

INLINE Unit_float unit_float(const float *from) { return *from; }

#define STEP_bfloat 2
#ifdef __AVX512BF16__
typedef uint32_t Unit_bfloat;

INLINE Part add_unit_bfloat(Part sums, const uint16_t *weight, Unit_bfloat x) {
    return (Part)_mm512_dpbf16_ps(
        (__m512)sums, (__m512bh)_mm512_loadu_si512(weight), (__m512bh)_mm512_set1_epi32((int)x));
}

INLINE Unit_bfloat unit_bfloat(const uint16_t *from) {
    Unit_bfloat pair;
    memcpy(&pair, from, sizeof pair);
    return pair;
}
#else
typedef struct {
    float lower, upper;
} Unit_bfloat;

INLINE Part add_unit_bfloat(Part sums, const uint16_t *weight, Unit_bfloat x) {
    const PartWords words = *(const PartWords *)weight;
    sums = add_scaled(sums, (Part)(words << 16), x.lower);
    return add_scaled(sums, (Part)(words & 0xffff0000u), x.upper);
}

INLINE Unit_bfloat unit_bfloat(const uint16_t *from) {
    return (Unit_bfloat){one_bfloat(from), one_bfloat(from + 1)};
}
#endif

#define ELEMENT float
#define NAME(x) x##_float
#include "panel_product_body.h"
#undef ELEMENT
#undef NAME

#define ELEMENT uint16_t
#define NAME(x) x##_bfloat
#include "panel_product_body.h"
