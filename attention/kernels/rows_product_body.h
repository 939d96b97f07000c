/* Included by rows_product.c once for each element type. */

/* Dot products of `STREAMS` weight rows with `num_rows` rows of x. */
static inline __attribute__((always_inline)) void NAME(dots)(
    const ELEMENT *const rows[STREAMS], const ELEMENT *x, int64_t x_stride, int64_t in_size,
    const int num_rows, float sums[STREAMS][MAX_ROWS]) {
    Floats totals[STREAMS][MAX_ROWS];
    for (int s = 0; s < STREAMS; s++)
        for (int m = 0; m < num_rows; m++) totals[s][m] = (Floats){0};
    const int64_t whole = in_size - in_size % (2 * LANES);
    for (int64_t i = 0; i < whole; i += 2 * LANES) {
        Pair lanes[MAX_ROWS];
        for (int m = 0; m < num_rows; m++) lanes[m] = NAME(pair)(x + m * x_stride + i);
        for (int s = 0; s < STREAMS; s++) {
            for (size_t byte = 0; byte < 2 * LANES * sizeof(ELEMENT); byte += LINE)
                __builtin_prefetch((const char *)(rows[s] + i) + AHEAD + byte);
            const Pair weights = NAME(pair)(rows[s] + i);
            for (int m = 0; m < num_rows; m++) {
                totals[s][m] += weights.first * lanes[m].first;
                totals[s][m] += weights.second * lanes[m].second;
            }
        }
    }
    for (int s = 0; s < STREAMS; s++)
        for (int m = 0; m < num_rows; m++) {
            float sum = sum_of(totals[s][m]);
            for (int64_t i = whole; i < in_size; i++)
                sum += NAME(one)(rows[s] + i) * NAME(one)(x + m * x_stride + i);
            sums[s][m] = sum;
        }
}

static inline __attribute__((always_inline)) void NAME(rows)(
    const Shape *shape, const ELEMENT *x, const ELEMENT *weight, const ELEMENT *bias, ELEMENT *out,
    const int num_rows) {
    const int64_t in_size = shape->in_size, out_size = shape->out_size;
    const int lanes_of_out = shape->is_gated ? STREAMS / 2 : STREAMS;
#pragma omp parallel
    {
        const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t begin = out_size * thread / num_threads;
        const int64_t end = out_size * (thread + 1) / num_threads;
        const int64_t run = (end - begin + lanes_of_out - 1) / lanes_of_out;
        for (int64_t r = 0; r < run; r++) {
            const ELEMENT *rows[STREAMS];
            int64_t columns[STREAMS];
            for (int s = 0; s < lanes_of_out; s++) {
                /* The last run may be shorter; what it computes twice is stored twice. */
                const int64_t column = begin + s * run + r;
                columns[s] = column < end ? column : end - 1;
                rows[s] = weight + columns[s] * in_size;
                if (shape->is_gated)
                    rows[STREAMS / 2 + s] = weight + (out_size + columns[s]) * in_size;
            }
            float sums[STREAMS][MAX_ROWS];
            NAME(dots)(rows, x, shape->x_stride, in_size, num_rows, sums);
            for (int s = 0; s < lanes_of_out; s++)
                for (int m = 0; m < num_rows; m++) {
                    const int64_t column = columns[s];
                    float value = sums[s][m];
                    if (bias) value += NAME(one)(bias + column);
                    if (shape->is_gated) {
                        float up = sums[STREAMS / 2 + s][m];
                        if (bias) up += NAME(one)(bias + out_size + column);
                        value = silu(value) * up;
                    }
                    NAME(store)(out + m * out_size + column, value);
                }
        }
    }
}

void NAME(rows_product)(
    const Shape *shape, const ELEMENT *x, const ELEMENT *weight, const ELEMENT *bias,
    ELEMENT *out) {
    switch (shape->num_rows) {
        case 1: NAME(rows)(shape, x, weight, bias, out, 1); break;
        case 2: NAME(rows)(shape, x, weight, bias, out, 2); break;
        case 3: NAME(rows)(shape, x, weight, bias, out, 3); break;
        default: NAME(rows)(shape, x, weight, bias, out, 4);
    }
}
