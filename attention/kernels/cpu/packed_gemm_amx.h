/* The multipliers of packed_gemm_tiles.h in tiles of AMX, for bfloat16. */
#include "amx.h"

#define CHUNK 16
#define MICRO_ROWS 32
#define MOST_ROWS 64
#define COLUMNS 16 /* of the product of two registers */
_Static_assert(TILE == 2 * COLUMNS, "two registers have the columns of a tile");
/* Rows are read sixteen at a time. */
#define SPARE_BYTES (TILE_ROWS * TILE_ROW_BYTES)
#define BEGIN() begin_tiles()
#define END() end_tiles()

typedef uint32_t Unit_bfloat;
#define STEP_bfloat 2

INLINE Unit_bfloat unit_bfloat(const uint16_t *from) {
    Unit_bfloat pair;
    memcpy(&pair, from, sizeof pair);
    return pair;
}

/* The rows of a strip: all strips but the last are whole. */
INLINE Range strip_of(int64_t num_rows, int64_t num_strips, int64_t strip) {
    const int64_t begin = strip * MICRO_ROWS;
    return (Range){begin, strip + 1 < num_strips ? begin + MICRO_ROWS : num_rows};
}

/*
 * Adds to `sums`, of sixteen rows, or twice as many if `is_tall`. A slice of a row of x is a row of a
 * register. Where `num_rows` is no multiple of sixteen, the rows of other slices that follow are
 * multiplied too, and what is added to the sums after the last row is not used.
 */
INLINE void micro_kernel_amx(
    const uint32_t *x, const uint16_t *weight, int64_t num_slices, int64_t num_rows,
    const int is_tall, float *sums, const char *ahead, int64_t num_lines) {
    const int64_t sums_stride = TILE * sizeof(float), weight_stride = TILE * STEP_bfloat * 2;
    float *lower = sums + TILE_ROWS * TILE;
    SYNC_TILES();
    LOAD_TILE(0, sums, sums_stride);
    LOAD_TILE(1, sums + COLUMNS, sums_stride);
    if (is_tall) {
        LOAD_TILE(2, lower, sums_stride);
        LOAD_TILE(3, lower + COLUMNS, sums_stride);
    }
    for (int64_t slice = 0; slice < num_slices; slice++) {
        LOAD_TILE(4, x, TILE_ROW_BYTES);
        STREAM_TILE(6, weight, weight_stride);
        STREAM_TILE(7, weight + COLUMNS * STEP_bfloat, weight_stride);
        ADD_TILES(0, 4, 6);
        ADD_TILES(1, 4, 7);
        if (is_tall) {
            LOAD_TILE(5, x + TILE_ROWS * SLICE, TILE_ROW_BYTES);
            ADD_TILES(2, 5, 6);
            ADD_TILES(3, 5, 7);
        }
        for (int64_t line = 0; line < num_lines; line++, ahead += LINE)
            __builtin_prefetch(ahead, 0, 2);
        x += num_rows * SLICE;
        weight += SLICE * STEP_bfloat * TILE;
    }
    STORE_TILE(0, sums, sums_stride);
    STORE_TILE(1, sums + COLUMNS, sums_stride);
    if (is_tall) {
        STORE_TILE(2, lower, sums_stride);
        STORE_TILE(3, lower + COLUMNS, sums_stride);
    }
}

/* `num_lines` are those of a quarter of a slice. */
INLINE void add_strip_bfloat(
    const uint32_t *x, const uint16_t *weight, int64_t num_slices, int64_t num_rows, float *sums,
    const char *ahead, int64_t num_lines) {
    if (num_rows > TILE_ROWS)
        micro_kernel_amx(x, weight, num_slices, num_rows, 1, sums, ahead, 4 * num_lines);
    else
        micro_kernel_amx(x, weight, num_slices, num_rows, 0, sums, ahead, 4 * num_lines);
}
