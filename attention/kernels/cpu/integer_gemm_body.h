/* The GEMM of integer_gemm.c for one width of numbers; included once for each. */

#define PER_WORD NAME(PER_WORD)
#define WORD NAME(Word)

/* Adds the scaled sums of a piece to `totals`, `[VECTORS]`. */
INLINE void NAME(add_piece)(
    const Part *sums, const uint16_t *scales, const float *minimums, float sum_of_x,
    Part *totals) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        totals[v] = add_scaled(totals[v], sums[v], load_halves(scales + v * WIDTH));
        if (minimums)
            totals[v] = add_scaled(
                totals[v], *(const Part *)(minimums + v * WIDTH), (Part){} + sum_of_x);
    }
}

/*
 * Adds the products of a few rows with a strip of a tile to `totals`, `[num_rows][STRIPS *
 * VECTORS]`. `num_rows` is a constant to the compiler, which keeps the sums in registers.
 */
INLINE void NAME(add_few_rows)(
    const Shape *shape, const uint16_t *x, const int num_rows, const WORD *words,
    const uint16_t *scales, const float *minimums, Part *totals) {
    const int64_t num_groups = shape->in_size / shape->group_size;
    for (int64_t group = 0; group < num_groups; group++) {
        for (int64_t first = 0; first < shape->group_size; first += PIECE) {
            const int64_t size = smaller(shape->group_size - first, PIECE);
            Part sums[MICRO_ROWS][VECTORS];
#pragma GCC unroll 6
            for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) sums[m][v] = (Part){0};
            for (int64_t k = 0; k < size; k += PER_WORD, words += TILE)
#pragma GCC unroll 4
                for (int pair = 0; pair < PER_WORD / 2; pair++)
#pragma GCC unroll 4
                    for (int v = 0; v < VECTORS; v++) {
                        const Numbers numbers = NAME(numbers)(words + v * WIDTH, pair);
#pragma GCC unroll 6
                        for (int m = 0; m < num_rows; m++)
                            sums[m][v] = add_numbers(
                                sums[m][v], numbers,
                                inputs_of(x + m * shape->x_stride + k + 2 * pair));
                    }
#pragma GCC unroll 6
            for (int m = 0; m < num_rows; m++)
                NAME(add_piece)(
                    sums[m], scales, minimums,
                    minimums ? sum_of_inputs(x + m * shape->x_stride, size) : 0,
                    totals + m * STRIPS * VECTORS);
            x += size;
        }
        scales += TILE;
        if (minimums) minimums += TILE;
    }
}

/* As `add_few_rows`, for one piece, whose numbers are unpacked: `[pairs][VECTORS]`. */
INLINE void NAME(add_unpacked)(
    const Shape *shape, const uint16_t *x, const int num_rows, const Numbers *numbers,
    int64_t size, const uint16_t *scales, const float *minimums, Part *totals) {
    Part sums[MICRO_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[m][v] = (Part){0};
    for (int64_t k = 0; k < size; k += 2, numbers += VECTORS)
#pragma GCC unroll 6
        for (int m = 0; m < num_rows; m++) {
            const Inputs inputs = inputs_of(x + m * shape->x_stride + k);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sums[m][v] = add_numbers(sums[m][v], numbers[v], inputs);
        }
#pragma GCC unroll 6
    for (int m = 0; m < num_rows; m++)
        NAME(add_piece)(
            sums[m], scales, minimums,
            minimums ? sum_of_inputs(x + m * shape->x_stride, size) : 0,
            totals + m * STRIPS * VECTORS);
}

/* As `add_few_rows`, for any number of rows, for which each piece is unpacked once. */
static void NAME(add_many_rows)(
    const Shape *shape, const uint16_t *x, int64_t num_rows, const WORD *words,
    const uint16_t *scales, const float *minimums, Part *totals) {
    Numbers numbers[PIECE / 2 * VECTORS] __attribute__((aligned(LINE)));
    const int64_t num_groups = shape->in_size / shape->group_size;
    const int64_t num_strips = num_parts_of(num_rows, MICRO_ROWS);
    for (int64_t group = 0; group < num_groups; group++) {
        for (int64_t first = 0; first < shape->group_size; first += PIECE) {
            const int64_t size = smaller(shape->group_size - first, PIECE);
            Numbers *unpacked = numbers;
            for (int64_t k = 0; k < size; k += PER_WORD, words += TILE)
#pragma GCC unroll 4
                for (int pair = 0; pair < PER_WORD / 2; pair++)
#pragma GCC unroll 4
                    for (int v = 0; v < VECTORS; v++)
                        *unpacked++ = NAME(numbers)(words + v * WIDTH, pair);
            for (int64_t strip = 0; strip < num_strips; strip++) {
                const int64_t m = num_rows * strip / num_strips;
                const int64_t height = num_rows * (strip + 1) / num_strips - m;
                const uint16_t *rows = x + m * shape->x_stride;
                Part *sums = totals + m * STRIPS * VECTORS;
                switch (height) {
#define UNPACKED(rows_of_strip)                                                              \
    case rows_of_strip:                                                                      \
        NAME(add_unpacked)(                                                                  \
            shape, rows, rows_of_strip, numbers, size, scales, minimums, sums);               \
        break;
                    EACH_HEIGHT(UNPACKED)
#undef UNPACKED
                }
            }
            x += size;
        }
        scales += TILE;
        if (minimums) minimums += TILE;
    }
}

/* Writes the products of rows with a tile to `totals`, `[num_rows][TILE]`. */
static void NAME(multiply)(
    const Shape *shape, const uint16_t *x, int64_t num_rows, const Weight *weight, int64_t tile,
    const uint16_t *bias, int64_t width, float *totals) {
    const int64_t tile_words = shape->in_size / PER_WORD * TILE;
    const int64_t tile_scales = shape->in_size / shape->group_size * TILE;
    float begin[TILE] = {0};
    if (bias)
        for (int64_t i = 0; i < width; i++) begin[i] = one_bfloat(bias + i);
    for (int64_t m = 0; m < num_rows; m++) memcpy(totals + m * TILE, begin, sizeof begin);
    for (int strip = 0; strip < STRIPS; strip++) {
        const int64_t column = strip * VECTORS * WIDTH;
        const WORD *words = (const WORD *)weight->words + tile * tile_words + column;
        const uint16_t *scales = weight->scales + tile * tile_scales + column;
        const float *minimums =
            weight->minimums ? weight->minimums + tile * tile_scales + column : 0;
        Part *sums = (Part *)(totals + column);
        switch (num_rows) {
#define FEW_ROWS(rows)                                                                 \
    case rows:                                                                         \
        NAME(add_few_rows)(shape, x, rows, words, scales, minimums, sums);              \
        break;
            EACH_HEIGHT(FEW_ROWS)
#undef FEW_ROWS
        default:
            NAME(add_many_rows)(shape, x, num_rows, words, scales, minimums, sums);
        }
    }
}

/* Called by integer_gemm.py. x `[num_rows][x_stride]`, out `[num_rows][out_size]`. */
void NAME(integer_gemm)(
    const Shape *shape, const uint16_t *x, const Weight *weight, uint16_t *out) {
    const int64_t out_size = shape->out_size;
    const int64_t num_tiles = num_parts_of(out_size, TILE);
    const int64_t num_passes = num_parts_of(shape->num_rows, MOST_ROWS);
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t pass = 0; pass < num_passes; pass++) {
        for (int64_t tile = 0; tile < num_tiles; tile++) {
            float sums[2][MOST_ROWS * TILE] __attribute__((aligned(LINE)));
            const int64_t first = shape->num_rows * pass / num_passes;
            const int64_t num_rows = shape->num_rows * (pass + 1) / num_passes - first;
            const int64_t column = tile * TILE, width = smaller(out_size - column, TILE);
            for (int half = 0; half <= shape->is_gated; half++)
                NAME(multiply)(
                    shape, x + first * shape->x_stride, num_rows, weight,
                    half * num_tiles + tile,
                    weight->bias ? weight->bias + half * out_size + column : 0, width, sums[half]);
            for (int64_t m = 0; m < num_rows; m++) {
                float *row = sums[0] + m * TILE;
                if (shape->is_gated)
                    for (int i = 0; i < TILE; i += LANES)
                        *(Floats *)(row + i) =
                            silu_of(load_float(row + i)) * load_float(sums[1] + m * TILE + i);
                uint16_t *to = out + (first + m) * out_size + column;
                if (width == TILE)
                    for (int i = 0; i < TILE; i++) store_bfloat(to + i, row[i]);
                else
                    for (int64_t i = 0; i < width; i++) store_bfloat(to + i, row[i]);
            }
        }
    }
}

#undef PER_WORD
#undef WORD
