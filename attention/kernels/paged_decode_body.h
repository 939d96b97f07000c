/* Included by paged_decode.c once for each element type. */

/* Scores of the keys of one block, `scores[g][key]`. */
INLINE void NAME(score_block)(
    const Shape *shape, const float *query, const ELEMENT *keys, const int group, int64_t first,
    int64_t stop, float scores[][ROW]) {
    const int64_t size = shape->head_size, whole = size - size % LANES;
    const int64_t stride = shape->num_kv_heads * size;
    for (int64_t key = first; key < stop; key += 4) {
        /* Four keys at a time; what is beyond the last one is scored and never looked at. */
        const ELEMENT *rows[4];
        for (int k = 0; k < 4; k++) rows[k] = keys + (key + k < stop ? key + k : key) * stride;
        Floats sums[GROUP][4];
        for (int g = 0; g < group; g++)
            for (int k = 0; k < 4; k++) sums[g][k] = (Floats){0};
        for (int64_t i = 0; i < whole; i += LANES) {
            Floats lanes[4];
            for (int k = 0; k < 4; k++) lanes[k] = NAME(load)(rows[k] + i);
            for (int g = 0; g < group; g++) {
                const Floats q = load_float(query + g * size + i);
                for (int k = 0; k < 4; k++) sums[g][k] += q * lanes[k];
            }
        }
        for (int g = 0; g < group; g++) {
            float *score = scores[g] + key;
            sums_of_four(sums[g][0], sums[g][1], sums[g][2], sums[g][3], score);
            for (int64_t i = whole; i < size; i++)
                for (int k = 0; k < 4; k++)
                    score[k] += query[g * size + i] * NAME(one)(rows[k] + i);
        }
    }
}

/* Weights of the keys of a block in place of their scores; returns their sum. */
INLINE float NAME(weigh)(float *scores, int64_t first, int64_t stop, float top) {
    float sum = 0.0f;
    int64_t key = first;
    for (; key + LANES <= stop; key += LANES) {
        Floats weights = exp_of(load_float(scores + key) - top);
        *(Floats *)(scores + key) = weights;
        sum += sum_of(weights);
    }
    if (key < stop) {
        Floats rest = (Floats){} - INFINITY;
        memcpy(&rest, scores + key, (stop - key) * sizeof(float));
        rest = exp_of(rest - top);
        memcpy(scores + key, &rest, (stop - key) * sizeof(float));
        sum += sum_of(rest);
    }
    return sum;
}

/* Adds the weighted values of a block to `totals`, one row of `head_size` for each head. */
INLINE void NAME(add_values)(
    const Shape *shape, float weights[][ROW], const ELEMENT *values, const int group,
    int64_t first, int64_t stop, float *totals) {
    const int64_t size = shape->head_size, whole = size - size % LANES;
    const int64_t stride = shape->num_kv_heads * size;
    int64_t i = 0;
    for (; i + WIDE * LANES <= whole; i += WIDE * LANES) {
        Floats sums[GROUP][WIDE];
        for (int g = 0; g < group; g++)
            for (int v = 0; v < WIDE; v++)
                sums[g][v] = load_float(totals + g * size + i + v * LANES);
        for (int64_t key = first; key < stop; key++) {
            const ELEMENT *row = values + key * stride + i;
            Floats lanes[WIDE];
            for (int v = 0; v < WIDE; v++) lanes[v] = NAME(load)(row + v * LANES);
            for (int g = 0; g < group; g++)
                for (int v = 0; v < WIDE; v++) sums[g][v] += weights[g][key] * lanes[v];
        }
        for (int g = 0; g < group; g++)
            for (int v = 0; v < WIDE; v++)
                *(Floats *)(totals + g * size + i + v * LANES) = sums[g][v];
    }
    for (; i < size; i++)
        for (int g = 0; g < group; g++)
            for (int64_t key = first; key < stop; key++)
                totals[g * size + i] += weights[g][key] * NAME(one)(values + key * stride + i);
}

/* Begins to read a block's keys and values of one head. */
INLINE void NAME(fetch_block)(const Shape *shape, const ELEMENT *cache, int32_t block) {
    const int64_t row_bytes = shape->head_size * sizeof(ELEMENT);
    const int64_t stride = shape->num_kv_heads * shape->head_size;
    const ELEMENT *keys = cache + block * shape->block_stride;
    for (int64_t key = 0; key < shape->block_size; key++) {
        fetch(keys + key * stride, row_bytes);
        fetch(keys + shape->value_offset + key * stride, row_bytes);
    }
}

/* One sequence and some query heads that share a KV head. */
INLINE void NAME(attend)(
    const Shape *shape, const ELEMENT *query, const ELEMENT *cache, const int32_t *table,
    int64_t num_keys, const float *slopes, const int group, ELEMENT *out) {
    const int64_t size = shape->head_size, block_size = shape->block_size;
    float q[GROUP * MAX_HEAD], totals[GROUP * MAX_HEAD];
    float scores[GROUP][ROW], tops[GROUP], sums[GROUP];
    for (int64_t i = 0; i < group * size; i++) {
        q[i] = NAME(one)(query + i) * shape->scale;
        totals[i] = 0.0f;
    }
    for (int g = 0; g < group; g++) {
        tops[g] = -INFINITY;
        sums[g] = 0.0f;
    }
    int64_t begin = 0;
    if (shape->window > 0 && num_keys > shape->window) begin = num_keys - shape->window;
    const int64_t num_blocks = (num_keys + block_size - 1) / block_size;
    for (int64_t block = begin / block_size; block < num_blocks; block++) {
        const ELEMENT *keys = cache + table[block] * shape->block_stride;
        const ELEMENT *values = keys + shape->value_offset;
        if (block + AHEAD < num_blocks) NAME(fetch_block)(shape, cache, table[block + AHEAD]);
        const int64_t origin = block * block_size;
        const int64_t first = begin > origin ? begin - origin : 0;
        const int64_t stop = num_keys - origin < block_size ? num_keys - origin : block_size;
        NAME(score_block)(shape, q, keys, group, first, stop, scores);
        for (int g = 0; g < group; g++) {
            float top = tops[g];
            for (int64_t key = first; key < stop; key++) {
                float score = scores[g][key];
                if (shape->soft_cap > 0.0f)
                    score = shape->soft_cap * tanhf(score / shape->soft_cap);
                if (slopes) score += slopes[g] * (float)(origin + key - (num_keys - 1));
                scores[g][key] = score;
                top = score > top ? score : top;
            }
            if (top > tops[g]) {
                float shrink = tops[g] == -INFINITY ? 0.0f : expf(tops[g] - top);
                for (int64_t i = 0; i < size; i++) totals[g * size + i] *= shrink;
                sums[g] *= shrink;
                tops[g] = top;
            }
            sums[g] += NAME(weigh)(scores[g], first, stop, tops[g]);
        }
        NAME(add_values)(shape, scores, values, group, first, stop, totals);
    }
    for (int g = 0; g < group; g++)
        for (int64_t i = 0; i < size; i++)
            NAME(store)(out + g * size + i, totals[g * size + i] / sums[g]);
}

/* `query` and `out` are rows of all heads; `cache` begins at the layer's keys of block 0. */
void NAME(paged_decode)(
    const Shape *shape, const ELEMENT *query, const ELEMENT *cache, const int32_t *tables,
    const int32_t *num_keys, const float *slopes, ELEMENT *out) {
    const int64_t heads = shape->num_heads / shape->num_kv_heads;
    const int64_t num_items = shape->num_sequences * shape->num_kv_heads;
    /* A thread takes all heads of a sequence, whose rows lie side by side, if that leaves enough. */
    const int64_t share = shape->num_sequences >= 4 * omp_get_max_threads() ? shape->num_kv_heads : 1;
#pragma omp parallel for schedule(dynamic, share)
    for (int64_t item = 0; item < num_items; item++) {
        const int64_t sequence = item / shape->num_kv_heads, head = item % shape->num_kv_heads;
        const ELEMENT *layer = cache + head * shape->head_size;
        const int32_t *table = tables + sequence * shape->table_stride;
        for (int64_t g = 0; g < heads;) {
            const int64_t left = heads - g, column = (head * heads + g) * shape->head_size;
            const ELEMENT *from = query + sequence * shape->query_stride + column;
            ELEMENT *to = out + sequence * shape->out_stride + column;
            const float *slope = slopes ? slopes + head * heads + g : 0;
            const int64_t keys = num_keys[sequence];
            if (left >= 4) {
                NAME(attend)(shape, from, layer, table, keys, slope, 4, to);
                g += 4;
            } else if (left >= 2) {
                NAME(attend)(shape, from, layer, table, keys, slope, 2, to);
                g += 2;
            } else {
                NAME(attend)(shape, from, layer, table, keys, slope, 1, to);
                g += 1;
            }
        }
    }
}
