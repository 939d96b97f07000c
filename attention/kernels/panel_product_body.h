/* Included by panel_product.c once for each element type. */

#define UNIT NAME(Unit)
#define STEP NAME(STEP)
#define GROUP_ELEMENTS (GROUP * STEP * PANEL) /* of a panel */

/* Rows of x as tiles read them: `[num_groups][num_rows][GROUP]`, with zeros after the end. */
INLINE void NAME(lay_out)(
    const ELEMENT *x, int64_t x_stride, int64_t in_size, int64_t num_rows, UNIT *units) {
    const int64_t size = GROUP * STEP, num_whole = in_size / size;
    for (int64_t m = 0; m < num_rows; m++) {
        const ELEMENT *row = x + m * x_stride;
        for (int64_t group = 0; group < num_whole; group++)
            for (int i = 0; i < GROUP; i++)
                units[(group * num_rows + m) * GROUP + i] =
                    NAME(unit)(row + group * size + i * STEP);
        if (num_whole * size < in_size) {
            ELEMENT rest[GROUP * STEP] = {0};
            memcpy(rest, row + num_whole * size, (in_size - num_whole * size) * sizeof(ELEMENT));
            for (int i = 0; i < GROUP; i++)
                units[(num_whole * num_rows + m) * GROUP + i] = NAME(unit)(rest + i * STEP);
        }
    }
}

/* Adds to `sums`, `[num_rows][PANEL]`; fetches `num_lines` lines ahead for a quarter of a group. */
INLINE void NAME(tile)(
    const UNIT *x, const ELEMENT *weight, int64_t num_groups, const int num_rows, float *sums,
    const char *ahead, int64_t num_lines) {
    /* As `num_rows` is a constant to the compiler, these are registers. */
    Part totals[TILE_ROWS][VECTORS];
#pragma GCC unroll 12
    for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) totals[m][v] = (Part){0};
    for (int64_t group = 0; group < num_groups; group++) {
        for (int quarter = 0; quarter < 4; quarter++) {
            for (int64_t line = 0; line < num_lines; line++, ahead += LINE)
                __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 4
            for (int i = 0; i < GROUP / 4; i++) {
#pragma GCC unroll 12
                for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 8
                    for (int v = 0; v < VECTORS; v++)
                        totals[m][v] = NAME(add_unit)(
                            totals[m][v], weight + v * WIDTH * STEP, x[m * GROUP + i]);
                weight += PANEL * STEP;
            }
            x += GROUP / 4;
        }
        x += (num_rows - 1) * GROUP;
    }
#pragma GCC unroll 12
    for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            *(Part *)(sums + m * PANEL + v * WIDTH) += totals[m][v];
}

typedef void NAME(Tile)(
    const UNIT *x, const ELEMENT *weight, int64_t num_groups, float *sums, const char *ahead,
    int64_t num_lines);

#define TILE(rows)                                                                              \
    static void NAME(tile_##rows)(                                                              \
        const UNIT *x, const ELEMENT *weight, int64_t num_groups, float *sums,                  \
        const char *ahead, int64_t num_lines) {                                                 \
        NAME(tile)(x, weight, num_groups, rows, sums, ahead, num_lines);                        \
    }
TILE(1)
TILE(2)
TILE(3)
#if TILE_ROWS > 3
TILE(4)
TILE(5)
TILE(6)
TILE(7)
TILE(8)
TILE(9)
TILE(10)
TILE(11)
TILE(12)
#endif
#undef TILE

static NAME(Tile) *const NAME(tiles)[TILE_ROWS + 1] = {
    0, NAME(tile_1), NAME(tile_2), NAME(tile_3),
#if TILE_ROWS > 3
    NAME(tile_4), NAME(tile_5), NAME(tile_6), NAME(tile_7), NAME(tile_8), NAME(tile_9),
    NAME(tile_10), NAME(tile_11), NAME(tile_12),
#endif
};

INLINE void NAME(begin_sums)(
    const ELEMENT *bias, int64_t width, int64_t num_rows, float *sums) {
    float first[PANEL] = {0};
    if (bias)
        for (int64_t i = 0; i < width; i++) first[i] = NAME(one)(bias + i);
    for (int64_t m = 0; m < num_rows; m++) memcpy(sums + m * PANEL, first, sizeof first);
}

/*
 * Adds a panel's products to `sums`, `[num_rows][PANEL]`; meanwhile fetches what comes after each
 * chunk, and in the end what lies at `next`, if anything.
 */
INLINE void NAME(add_panel)(
    const UNIT *units, const ELEMENT *panel, const ELEMENT *next, int64_t num_groups,
    int64_t num_rows, int64_t num_tiles, float *sums) {
    const int64_t quarter_lines = GROUP_ELEMENTS * sizeof(ELEMENT) / LINE / 4;
    const int64_t num_lines = num_rows > UNAIDED ? num_parts_of(quarter_lines, num_tiles) : 0;
    const int64_t num_chunks = num_parts_of(num_groups, CHUNK);
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        const Range groups = part_of(num_groups, num_chunks, chunk);
        const int64_t size = groups.end - groups.begin;
        const int is_last = chunk + 1 == num_chunks;
        const char *ahead = (const char *)(is_last ? next : panel + groups.end * GROUP_ELEMENTS);
        const char *end = ahead ? ahead + size * GROUP_ELEMENTS * sizeof(ELEMENT) : 0;
        for (int64_t tile = 0; tile < num_tiles; tile++) {
            const Range rows = part_of(num_rows, num_tiles, tile);
            const int64_t height = rows.end - rows.begin;
            NAME(tiles)[height](
                units + (rows.begin * num_groups + groups.begin * height) * GROUP,
                panel + groups.begin * GROUP_ELEMENTS, size, sums + rows.begin * PANEL, ahead,
                ahead < end ? num_lines : 0);
            if (ahead < end) ahead += 4 * size * num_lines * LINE;
        }
    }
}

/* out = sums, or silu(sums) * others if there are such. */
INLINE void NAME(finish)(
    const float *sums, const float *others, int64_t num_rows, int64_t width, ELEMENT *out,
    int64_t out_stride) {
    for (int64_t m = 0; m < num_rows; m++) {
        float row[PANEL];
        memcpy(row, sums + m * PANEL, sizeof row);
        if (others)
            for (int i = 0; i < PANEL; i += LANES)
                *(Floats *)(row + i) =
                    silu_of(load_float(row + i)) * load_float(others + m * PANEL + i);
        if (width == PANEL)
            for (int i = 0; i < PANEL; i++) NAME(store)(out + m * out_stride + i, row[i]);
        else
            for (int64_t i = 0; i < width; i++) NAME(store)(out + m * out_stride + i, row[i]);
    }
}

/* The columns in `panels` of the result for as many rows as `x_units` has room for. */
INLINE void NAME(pass)(
    const Shape *shape, const Layout *layout, const ELEMENT *x, int64_t num_rows, Range panels,
    const ELEMENT *weight, const ELEMENT *bias, ELEMENT *out) {
    const int64_t out_size = shape->out_size, num_groups = layout->num_groups;
    const int64_t panel_size = num_groups * GROUP_ELEMENTS;
    const int64_t num_tiles = num_parts_of(num_rows, layout->tile_rows);
    UNIT *units = (UNIT *)x_units;
    float sums[2][MOST_ROWS * PANEL] __attribute__((aligned(LINE)));
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        const Range rows = part_of(num_rows, num_tiles, tile);
        NAME(lay_out)(
            x + rows.begin * shape->x_stride, shape->x_stride, shape->in_size,
            rows.end - rows.begin, units + rows.begin * num_groups * GROUP);
    }
    for (int64_t p = panels.begin; p < panels.end; p++) {
        const int64_t column = p * PANEL, width = smaller(out_size - column, PANEL);
        for (int half = 0; half <= shape->is_gated; half++) {
            const ELEMENT *panel = weight + (half * layout->num_panels + p) * panel_size;
            const ELEMENT *next = p + 1 < panels.end ? weight + (p + 1) * panel_size : 0;
            if (half < shape->is_gated) next = panel + layout->num_panels * panel_size;
            NAME(begin_sums)(
                bias ? bias + half * out_size + column : 0, width, num_rows, sums[half]);
            NAME(add_panel)(
                units, panel, next, num_groups, num_rows, num_tiles, sums[half]);
        }
        NAME(finish)(
            sums[0], shape->is_gated ? sums[1] : 0, num_rows, width, out + column, out_size);
    }
}

void NAME(panel_product)(
    const Shape *shape, const ELEMENT *x, const ELEMENT *weight, const ELEMENT *bias,
    ELEMENT *out) {
    const Layout layout = layout_of(shape, STEP, sizeof(UNIT));
#pragma omp parallel
    {
        const Share share = share_of(shape, &layout, omp_get_num_threads(), omp_get_thread_num());
        const int64_t num_rows = share.rows.end - share.rows.begin;
        const int64_t num_passes = num_parts_of(num_rows, layout.pass_rows);
        for (int64_t pass = 0; pass < num_passes; pass++) {
            const Range rows = part_of(num_rows, num_passes, pass);
            const int64_t first = share.rows.begin + rows.begin;
            NAME(pass)(
                shape, &layout, x + first * shape->x_stride, rows.end - rows.begin, share.panels,
                weight, bias, out + first * shape->out_size);
        }
    }
}

#undef UNIT
#undef STEP
#undef GROUP_ELEMENTS
