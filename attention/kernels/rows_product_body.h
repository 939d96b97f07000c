/* Included by rows_product.c once for each element type. */

/* Dot products of STREAMS weight rows with `num_rows` rows of x; the first to come fetch ahead. */
INLINE void NAME(dots)(
    const ELEMENT *const rows[STREAMS], const ELEMENT *x, int64_t x_stride, int64_t in_size,
    const int num_rows, const int is_first, float sums[STREAMS][GROUP]) {
    Floats totals[STREAMS][GROUP];
    for (int s = 0; s < STREAMS; s++)
        for (int m = 0; m < num_rows; m++) totals[s][m] = (Floats){0};
    const int64_t whole = in_size - in_size % (2 * LANES);
    for (int64_t i = 0; i < whole; i += 2 * LANES) {
        NAME(Step) weights[STREAMS];
        for (int s = 0; s < STREAMS; s++) {
            if (is_first)
                for (size_t byte = 0; byte < 2 * LANES * sizeof(ELEMENT); byte += LINE)
                    __builtin_prefetch((const char *)(rows[s] + i) + AHEAD + byte);
            weights[s] = NAME(step)(rows[s] + i);
        }
        for (int m = 0; m < num_rows; m++) {
            const NAME(Step) lanes = NAME(step)(x + m * x_stride + i);
            for (int s = 0; s < STREAMS; s++)
                totals[s][m] = NAME(add_step)(totals[s][m], weights[s], lanes);
        }
    }
    for (int m = 0; m < num_rows; m++) {
        float four[STREAMS];
        sums_of_four(totals[0][m], totals[1][m], totals[2][m], totals[3][m], four);
        for (int s = 0; s < STREAMS; s++) {
            for (int64_t i = whole; i < in_size; i++)
                four[s] += NAME(one)(rows[s] + i) * NAME(one)(x + m * x_stride + i);
            sums[s][m] = four[s];
        }
    }
}

/* The same for any number of rows of x from 1 to GROUP. */
INLINE void NAME(group_dots)(
    const ELEMENT *const rows[STREAMS], const ELEMENT *x, int64_t x_stride, int64_t in_size,
    int64_t num_rows, int is_first, float sums[STREAMS][GROUP]) {
    if (num_rows >= GROUP && is_first)
        NAME(dots)(rows, x, x_stride, in_size, GROUP, 1, sums);
    else if (num_rows >= GROUP)
        NAME(dots)(rows, x, x_stride, in_size, GROUP, 0, sums);
    else if (num_rows == 3)
        NAME(dots)(rows, x, x_stride, in_size, 3, 1, sums);
    else if (num_rows == 2)
        NAME(dots)(rows, x, x_stride, in_size, 2, 1, sums);
    else
        NAME(dots)(rows, x, x_stride, in_size, 1, 1, sums);
}

INLINE float NAME(finished)(
    const Shape *shape, const ELEMENT *bias, int64_t column, float value, float other) {
    if (bias) value += NAME(one)(bias + column);
    if (!shape->is_gated) return value;
    if (bias) other += NAME(one)(bias + shape->out_size + column);
    return silu(value) * other;
}

void NAME(rows_product)(
    const Shape *shape, const ELEMENT *x, const ELEMENT *weight, const ELEMENT *bias,
    ELEMENT *out) {
    const int64_t in_size = shape->in_size, out_size = shape->out_size;
    const int num_columns = shape->is_gated ? STREAMS / 2 : STREAMS;
#pragma omp parallel
    {
        const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t begin = out_size * thread / num_threads;
        const int64_t end = out_size * (thread + 1) / num_threads;
        const int64_t run = (end - begin + num_columns - 1) / num_columns;
        for (int64_t r = 0; r < run; r++) {
            const ELEMENT *rows[STREAMS];
            int64_t columns[STREAMS];
            for (int s = 0; s < num_columns; s++) {
                /* The last run may be shorter; what it computes twice is stored twice. */
                const int64_t column = begin + s * run + r;
                columns[s] = column < end ? column : end - 1;
                rows[s] = weight + columns[s] * in_size;
                if (shape->is_gated)
                    rows[STREAMS / 2 + s] = weight + (out_size + columns[s]) * in_size;
            }
            for (int64_t first = 0; first < shape->num_rows; first += GROUP) {
                const int64_t left = shape->num_rows - first;
                float sums[STREAMS][GROUP];
                NAME(group_dots)(
                    rows, x + first * shape->x_stride, shape->x_stride, in_size, left, first == 0,
                    sums);
                for (int s = 0; s < num_columns; s++)
                    for (int m = 0; m < GROUP && m < left; m++)
                        NAME(store)(
                            out + (first + m) * out_size + columns[s],
                            NAME(finished)(
                                shape, bias, columns[s], sums[s][m],
                                shape->is_gated ? sums[STREAMS / 2 + s][m] : 0.0f));
            }
        }
    }
}
