/* The products of a strip of rows and a tile of columns with vectors, for one element type. */

/* Adds to `sums`, `[num_rows][TILE]`; prefetches `num_lines` lines for each quarter of a slice. */
INLINE void NAME(micro_kernel)(
    const UNIT *x, const ELEMENT *weight, int64_t num_slices, const int num_rows, float *sums,
    const char *ahead, int64_t num_lines) {
    /* These are registers, since `num_rows` is a constant to the compiler. */
    Part totals[MICRO_ROWS][VECTORS];
#pragma GCC unroll 12
    for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++) totals[m][v] = (Part){0};
    for (int64_t slice = 0; slice < num_slices; slice++) {
        for (int quarter = 0; quarter < 4; quarter++) {
            for (int64_t line = 0; line < num_lines; line++, ahead += LINE)
                __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 4
            for (int i = 0; i < SLICE / 4; i++) {
#pragma GCC unroll 12
                for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 16
                    for (int v = 0; v < VECTORS; v++)
                        totals[m][v] = NAME(add_unit)(
                            totals[m][v], weight + v * WIDTH * STEP, x[m * SLICE + i]);
                weight += TILE * STEP;
            }
            x += SLICE / 4;
        }
        x += (num_rows - 1) * SLICE;
    }
#pragma GCC unroll 12
    for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++)
            *(Part *)(sums + m * TILE + v * WIDTH) += totals[m][v];
}

typedef void NAME(MicroKernel)(
    const UNIT *x, const ELEMENT *weight, int64_t num_slices, float *sums, const char *ahead,
    int64_t num_lines);

#define MICRO_KERNEL(rows)                                                                      \
    static void NAME(micro_kernel_##rows)(                                                      \
        const UNIT *x, const ELEMENT *weight, int64_t num_slices, float *sums,                  \
        const char *ahead, int64_t num_lines) {                                                 \
        NAME(micro_kernel)(x, weight, num_slices, rows, sums, ahead, num_lines);                \
    }
MICRO_KERNEL(1)
#if MICRO_ROWS > 1
MICRO_KERNEL(2)
MICRO_KERNEL(3)
#endif
#if MICRO_ROWS > 3
MICRO_KERNEL(4)
MICRO_KERNEL(5)
MICRO_KERNEL(6)
#endif
#if MICRO_ROWS > 6
MICRO_KERNEL(7)
MICRO_KERNEL(8)
MICRO_KERNEL(9)
MICRO_KERNEL(10)
MICRO_KERNEL(11)
MICRO_KERNEL(12)
#endif
#undef MICRO_KERNEL

static NAME(MicroKernel) *const NAME(micro_kernels)[MICRO_ROWS + 1] = {
    0, NAME(micro_kernel_1),
#if MICRO_ROWS > 1
    NAME(micro_kernel_2), NAME(micro_kernel_3),
#endif
#if MICRO_ROWS > 3
    NAME(micro_kernel_4), NAME(micro_kernel_5), NAME(micro_kernel_6),
#endif
#if MICRO_ROWS > 6
    NAME(micro_kernel_7), NAME(micro_kernel_8), NAME(micro_kernel_9), NAME(micro_kernel_10),
    NAME(micro_kernel_11), NAME(micro_kernel_12),
#endif
};

INLINE void NAME(add_strip)(
    const UNIT *x, const ELEMENT *weight, int64_t num_slices, int64_t num_rows, float *sums,
    const char *ahead, int64_t num_lines) {
    NAME(micro_kernels)[num_rows](x, weight, num_slices, sums, ahead, num_lines);
}
