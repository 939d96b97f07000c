/*
 * GEMM with a packed weight on the CPU: out[m][n] = sum_k x[m][k] * weight[n][k] + bias[n].
 * Included once for a size of tiles, TILE.
 *
 * The weight is packed into tiles of TILE output columns, so that each step of a sum (one k, or two
 * for bfloat16) reads two or four cache lines for all columns of the tile. A tile is multiplied by
 * all rows while it is in the cache; meanwhile software prefetches the next one into L2, because L1
 * cannot hold enough lines to hide the latency of memory. Few rows are therefore limited by memory
 * bandwidth, and many rows by the multipliers.
 *
 * Each sum is taken by one lane in the order of k, chunk by chunk to limit rounding: a row of the
 * result depends neither on the other rows of the batch nor on the number of threads.
 */
#include <omp.h>
#include <stdlib.h>

#include "lanes.h"

#define SLICE 16  /* steps that are contiguous in a row of x: a cache line of floats */
#define UNAIDED 2 /* up to so many rows the hardware prefetcher is better than software */
#define X_BYTES (2 * 1024 * 1024)

typedef struct {
    int64_t begin, end;
} Range;

/* Part `index` of `num_parts` that differ by one at most. */
INLINE Range part_of(int64_t size, int64_t num_parts, int64_t index) {
    return (Range){size * index / num_parts, size * (index + 1) / num_parts};
}

/*
 * What multiplies. A unit is what a step reads of a row of x. All rows of a pass over the tiles, up
 * to MOST_ROWS, are multiplied by CHUNK slices of a tile before the next ones, in strips of up to
 * MICRO_ROWS, whose sums stay in registers.
 */
#ifdef AMX
#include "packed_gemm_amx.h"
#else
#include "packed_gemm_vectors.h"
#endif

typedef struct {
    int64_t num_rows;
    int64_t in_size;
    int64_t out_size; /* of the result; a gated weight has twice as many */
    int64_t x_stride;
    int64_t is_gated; /* out = silu(first half of the columns) * second half */
} Shape;

/* How the work is split. */
typedef struct {
    int64_t num_slices; /* of a tile */
    int64_t num_tiles;  /* of the result */
    int64_t micro_rows; /* of a strip, at most */
    int64_t pass_rows;  /* as many as fit in `x_units` */
} Layout;

/* The part of one thread. */
typedef struct {
    Range rows, tiles;
} Share;

/* The rows of x of a pass, a copy for each thread, so that no thread waits for another. */
static _Thread_local char x_units[X_BYTES + SPARE_BYTES] __attribute__((aligned(LINE)));

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t num_parts_of(int64_t size, int64_t part) { return (size + part - 1) / part; }

INLINE Layout layout_of(const Shape *shape, int64_t step, int64_t unit_bytes) {
    const int64_t num_slices = num_parts_of(shape->in_size, SLICE * step);
    const int64_t most_rows = X_BYTES / (num_slices * SLICE * unit_bytes);
    const int64_t micro_rows = smaller(most_rows, MICRO_ROWS);
    return (Layout){
        .num_slices = num_slices,
        .num_tiles = num_parts_of(shape->out_size, TILE),
        .micro_rows = micro_rows,
        .pass_rows = smaller(most_rows, MOST_ROWS) / micro_rows * micro_rows,
    };
}

/*
 * Threads divide the tiles among themselves. They divide the rows instead where there are enough
 * for several passes, so that no row is copied twice, and both where threads outnumber tiles.
 */
INLINE Share share_of(
    const Shape *shape, const Layout *layout, int64_t num_threads, int64_t thread) {
    const int64_t num_passes = shape->num_rows / layout->pass_rows;
    const int64_t crowd = smaller(num_threads / layout->num_tiles, shape->num_rows);
    int64_t num_parts = smaller(num_passes > crowd ? num_passes : crowd, num_threads);
    while (num_parts > 1 && num_threads % num_parts) num_parts--;
    if (num_parts < 1) num_parts = 1;
    return (Share){
        .rows = part_of(shape->num_rows, num_parts, thread % num_parts),
        .tiles = part_of(layout->num_tiles, num_threads / num_parts, thread / num_parts),
    };
}

#ifndef AMX
#define ELEMENT float
#define NAME(x) x##_float
#include "packed_gemm_body.h"
#undef ELEMENT
#undef NAME
#endif

#define ELEMENT uint16_t
#define NAME(x) x##_bfloat
#include "packed_gemm_body.h"

#ifndef AMX
/*
 * Packs a weight in place, `[num_tiles][TILE][num_units]` as `[num_tiles][num_units][TILE]`. A unit
 * is what a step of a sum reads of a column: one float, or two bfloats. Returns 0, and changes
 * nothing, if there is no memory for a copy of a tile for each thread.
 */
int64_t pack_tiles(uint32_t *units, int64_t num_tiles, int64_t num_units) {
    const int64_t tile_units = TILE * num_units;
    uint32_t *copies = malloc(omp_get_max_threads() * tile_units * sizeof *units);
    if (!copies) return 0;
#pragma omp parallel
    {
        uint32_t *restrict rows = copies + omp_get_thread_num() * tile_units;
#pragma omp for
        for (int64_t tile = 0; tile < num_tiles; tile++) {
            uint32_t *restrict packed = units + tile * tile_units;
            memcpy(rows, packed, tile_units * sizeof *units);
            /* A cache line of each row at a time. */
            for (int64_t first = 0; first < num_units; first += SLICE)
                for (int row = 0; row < TILE; row++)
                    for (int64_t i = first; i < first + SLICE; i++)
                        packed[i * TILE + row] = rows[row * num_units + i];
        }
    }
    free(copies);
    return 1;
}
#endif
