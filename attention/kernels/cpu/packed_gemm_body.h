/* The GEMM of packed_gemm_tiles.h for one element type; included once for each. */

#define UNIT NAME(Unit)
#define STEP NAME(STEP)
#define SLICE_ELEMENTS (SLICE * STEP * TILE) /* of a tile */

/* Copies rows of x in the order of reading, `[num_slices][num_rows][SLICE]`, padded with zeros. */
INLINE void NAME(lay_out)(
    const ELEMENT *x, int64_t x_stride, int64_t in_size, int64_t num_rows, UNIT *units) {
    const int64_t size = SLICE * STEP, num_whole = in_size / size;
    for (int64_t m = 0; m < num_rows; m++) {
        const ELEMENT *row = x + m * x_stride;
        for (int64_t slice = 0; slice < num_whole; slice++)
            for (int i = 0; i < SLICE; i++)
                units[(slice * num_rows + m) * SLICE + i] =
                    NAME(unit)(row + slice * size + i * STEP);
        if (num_whole * size < in_size) {
            ELEMENT rest[SLICE * STEP] = {0};
            memcpy(rest, row + num_whole * size, (in_size - num_whole * size) * sizeof(ELEMENT));
            for (int i = 0; i < SLICE; i++)
                units[(num_whole * num_rows + m) * SLICE + i] = NAME(unit)(rest + i * STEP);
        }
    }
}

#ifndef AMX
#include "packed_gemm_micro.h"
#endif

INLINE void NAME(begin_sums)(
    const ELEMENT *bias, int64_t width, int64_t num_rows, float *sums) {
    float first[TILE] = {0};
    if (bias)
        for (int64_t i = 0; i < width; i++) first[i] = NAME(one)(bias + i);
    for (int64_t m = 0; m < num_rows; m++) memcpy(sums + m * TILE, first, sizeof first);
}

/*
 * Adds the products with one tile to `sums`, `[num_rows][TILE]`; prefetches the next chunk, and
 * during the last one the tile at `next`, unless that is null.
 */
INLINE void NAME(add_tile)(
    const UNIT *units, const ELEMENT *tile, const ELEMENT *next, int64_t num_slices,
    int64_t num_rows, int64_t num_strips, float *sums) {
    const int64_t quarter_lines = SLICE_ELEMENTS * sizeof(ELEMENT) / LINE / 4;
    const int64_t num_lines = num_rows > UNAIDED ? num_parts_of(quarter_lines, num_strips) : 0;
    const int64_t num_chunks = num_parts_of(num_slices, CHUNK);
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        const Range slices = part_of(num_slices, num_chunks, chunk);
        const int64_t size = slices.end - slices.begin;
        const int is_last = chunk + 1 == num_chunks;
        const char *ahead = (const char *)(is_last ? next : tile + slices.end * SLICE_ELEMENTS);
        const char *end = ahead ? ahead + size * SLICE_ELEMENTS * sizeof(ELEMENT) : 0;
        for (int64_t strip = 0; strip < num_strips; strip++) {
            const Range rows = strip_of(num_rows, num_strips, strip);
            const int64_t height = rows.end - rows.begin;
            NAME(add_strip)(
                units + (rows.begin * num_slices + slices.begin * height) * SLICE,
                tile + slices.begin * SLICE_ELEMENTS, size, height, sums + rows.begin * TILE,
                ahead, ahead < end ? num_lines : 0);
            if (ahead < end) ahead += 4 * size * num_lines * LINE;
        }
    }
}

/* out = sums, or silu(sums) * others if `others` is not null. */
INLINE void NAME(finish)(
    const float *sums, const float *others, int64_t num_rows, int64_t width, ELEMENT *out,
    int64_t out_stride) {
    for (int64_t m = 0; m < num_rows; m++) {
        float row[TILE];
        memcpy(row, sums + m * TILE, sizeof row);
        if (others)
            for (int i = 0; i < TILE; i += LANES)
                *(Floats *)(row + i) =
                    silu_of(load_float(row + i)) * load_float(others + m * TILE + i);
        if (width == TILE)
            for (int i = 0; i < TILE; i++) NAME(store)(out + m * out_stride + i, row[i]);
        else
            for (int64_t i = 0; i < width; i++) NAME(store)(out + m * out_stride + i, row[i]);
    }
}

/* Computes the columns of `tiles` for as many rows as fit in `x_units`. */
INLINE void NAME(pass)(
    const Shape *shape, const Layout *layout, const ELEMENT *x, int64_t num_rows, Range tiles,
    const ELEMENT *weight, const ELEMENT *bias, ELEMENT *out) {
    const int64_t out_size = shape->out_size, num_slices = layout->num_slices;
    const int64_t tile_size = num_slices * SLICE_ELEMENTS;
    const int64_t num_strips = num_parts_of(num_rows, layout->micro_rows);
    UNIT *units = (UNIT *)x_units;
    float sums[2][MOST_ROWS * TILE] __attribute__((aligned(LINE)));
    for (int64_t strip = 0; strip < num_strips; strip++) {
        const Range rows = strip_of(num_rows, num_strips, strip);
        NAME(lay_out)(
            x + rows.begin * shape->x_stride, shape->x_stride, shape->in_size,
            rows.end - rows.begin, units + rows.begin * num_slices * SLICE);
    }
    for (int64_t p = tiles.begin; p < tiles.end; p++) {
        const int64_t column = p * TILE, width = smaller(out_size - column, TILE);
        for (int half = 0; half <= shape->is_gated; half++) {
            const ELEMENT *tile = weight + (half * layout->num_tiles + p) * tile_size;
            const ELEMENT *next = p + 1 < tiles.end ? weight + (p + 1) * tile_size : 0;
            if (half < shape->is_gated) next = tile + layout->num_tiles * tile_size;
            NAME(begin_sums)(
                bias ? bias + half * out_size + column : 0, width, num_rows, sums[half]);
            NAME(add_tile)(
                units, tile, next, num_slices, num_rows, num_strips, sums[half]);
        }
        NAME(finish)(
            sums[0], shape->is_gated ? sums[1] : 0, num_rows, width, out + column, out_size);
    }
}

/* Called by packed_gemm.py. x `[num_rows][x_stride]`, out `[num_rows][out_size]`, bias or null. */
void NAME(packed_gemm)(
    const Shape *shape, const ELEMENT *x, const ELEMENT *weight, const ELEMENT *bias,
    ELEMENT *out) {
    const Layout layout = layout_of(shape, STEP, sizeof(UNIT));
#pragma omp parallel
    {
        BEGIN();
        const Share share = share_of(shape, &layout, omp_get_num_threads(), omp_get_thread_num());
        const int64_t num_rows = share.rows.end - share.rows.begin;
        const int64_t num_passes = num_parts_of(num_rows, layout.pass_rows);
        for (int64_t pass = 0; pass < num_passes; pass++) {
            const Range rows = part_of(num_rows, num_passes, pass);
            const int64_t first = share.rows.begin + rows.begin;
            NAME(pass)(
                shape, &layout, x + first * shape->x_stride, rows.end - rows.begin, share.tiles,
                weight, bias, out + first * shape->out_size);
        }
        END();
    }
}

#undef UNIT
#undef STEP
#undef SLICE_ELEMENTS
