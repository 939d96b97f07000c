/* The kernels of token_rows.c for one element type; included once for each. */

/*
 * stream += delta, unless that is null; out = stream / sqrt(mean(stream^2) + eps) * weight.
 * Called by AddNorm in token_rows.py. Rows of stream and delta are strided, those of out are not.
 */
void NAME(add_norm)(
    ELEMENT *stream, int64_t stream_stride, const ELEMENT *delta, int64_t delta_stride,
    const ELEMENT *weight, ELEMENT *out, int64_t num_rows, int64_t size, float eps) {
#pragma omp parallel for if (num_rows * size > MANY)
    for (int64_t row = 0; row < num_rows; row++) {
        ELEMENT *x = stream + row * stream_stride;
        if (delta) {
            const ELEMENT *d = delta + row * delta_stride;
            for (int64_t i = 0; i < size; i++)
                NAME(store)(x + i, NAME(one)(x + i) + NAME(one)(d + i));
        }
        float squares = 0.0f;
        for (int64_t i = 0; i < size; i++) squares += NAME(one)(x + i) * NAME(one)(x + i);
        const float scale = 1.0f / sqrtf(squares / (float)size + eps);
        for (int64_t i = 0; i < size; i++)
            NAME(store)(out + row * size + i, NAME(one)(x + i) * scale * NAME(one)(weight + i));
    }
}

/*
 * Rotates the pairs (i, i + half) of each head in place; called by Rotate in token_rows.py.
 * `table` is `[num_positions][head_size]`: cosines, then sines.
 */
void NAME(rotate)(
    ELEMENT *rows, int64_t stride, const int64_t *positions, const float *table, int64_t num_rows,
    int64_t num_heads, int64_t head_size) {
    const int64_t half = head_size / 2;
#pragma omp parallel for if (num_rows * num_heads * head_size > MANY)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *cosines = table + positions[row] * head_size, *sines = cosines + half;
        for (int64_t head = 0; head < num_heads; head++) {
            ELEMENT *first = rows + row * stride + head * head_size, *second = first + half;
            for (int64_t i = 0; i < half; i++) {
                const float a = NAME(one)(first + i), b = NAME(one)(second + i);
                NAME(store)(first + i, a * cosines[i] - b * sines[i]);
                NAME(store)(second + i, b * cosines[i] + a * sines[i]);
            }
        }
    }
}

INLINE Floats NAME(gate_of)(const ELEMENT *gate, const ELEMENT *up) {
    return silu_of(NAME(load)(gate)) * NAME(load)(up);
}

/*
 * out = silu(first half of the columns) * second half; called by Gate in token_rows.py. Rows of
 * columns are strided, those of out are not.
 */
void NAME(gate)(
    const ELEMENT *columns, int64_t stride, ELEMENT *out, int64_t num_rows, int64_t size) {
    const int64_t num_whole = size / LANES * LANES, num_left = size - num_whole;
#pragma omp parallel for if (num_rows * size > MANY_GATES)
    for (int64_t row = 0; row < num_rows; row++) {
        const ELEMENT *gate = columns + row * stride, *up = gate + size;
        ELEMENT *to = out + row * size;
        for (int64_t i = 0; i < num_whole; i += LANES)
            NAME(store_all)(to + i, NAME(gate_of)(gate + i, up + i));
        if (num_left) {
            ELEMENT rest[2][LANES] = {{0}};
            memcpy(rest[0], gate + num_whole, num_left * sizeof(ELEMENT));
            memcpy(rest[1], up + num_whole, num_left * sizeof(ELEMENT));
            NAME(store_all)(rest[0], NAME(gate_of)(rest[0], rest[1]));
            memcpy(to + num_whole, rest[0], num_left * sizeof(ELEMENT));
        }
    }
}
