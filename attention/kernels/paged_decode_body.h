/* Included by paged_decode.c once for each element type. */

/* Scores of the keys of one block, `scores[g][key]`. */
static inline void NAME(score_block)(
    const Shape *shape, const float *query, const ELEMENT *keys, int64_t group, int64_t first,
    int64_t stop, float scores[][MAX_BLOCK]) {
    const int64_t size = shape->head_size, whole = size - size % LANES;
    const int64_t stride = shape->num_kv_heads * size;
    for (int64_t key = first; key < stop; key++) {
        const ELEMENT *row = keys + key * stride;
        for (int64_t g = 0; g < group; g++) {
            const float *q = query + g * size;
            Floats sums = {0};
            for (int64_t i = 0; i < whole; i += LANES)
                sums += load_float(q + i) * NAME(load)(row + i);
            float score = sum_of(sums);
            for (int64_t i = whole; i < size; i++) score += q[i] * NAME(one)(row + i);
            scores[g][key] = score;
        }
    }
}

/* Weights of the keys of a block in place of their scores; returns their sum. */
static inline float NAME(weigh)(float *scores, int64_t first, int64_t stop, float top) {
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
        for (int64_t i = 0; i < stop - key; i++) sum += rest[i];
    }
    return sum;
}

static inline void NAME(add_values)(
    const Shape *shape, const float *weights, const ELEMENT *values, int64_t first, int64_t stop,
    float *total) {
    const int64_t size = shape->head_size, whole = size - size % LANES;
    const int64_t stride = shape->num_kv_heads * size;
    for (int64_t i = 0; i < whole; i += LANES) {
        Floats sums = load_float(total + i);
        for (int64_t key = first; key < stop; key++)
            sums += weights[key] * NAME(load)(values + key * stride + i);
        *(Floats *)(total + i) = sums;
    }
    for (int64_t i = whole; i < size; i++)
        for (int64_t key = first; key < stop; key++)
            total[i] += weights[key] * NAME(one)(values + key * stride + i);
}

/* One sequence and one KV head, for at most MAX_GROUP query heads that share it. */
static void NAME(attend)(
    const Shape *shape, const ELEMENT *query, const ELEMENT *cache, const int32_t *table,
    int64_t num_keys, const float *slopes, int64_t group, ELEMENT *out) {
    const int64_t size = shape->head_size, block_size = shape->block_size;
    float q[MAX_GROUP * MAX_HEAD], totals[MAX_GROUP * MAX_HEAD];
    float scores[MAX_GROUP][MAX_BLOCK], tops[MAX_GROUP], sums[MAX_GROUP];
    for (int64_t i = 0; i < group * size; i++) {
        q[i] = NAME(one)(query + i) * shape->scale;
        totals[i] = 0.0f;
    }
    for (int64_t g = 0; g < group; g++) {
        tops[g] = -INFINITY;
        sums[g] = 0.0f;
    }
    int64_t begin = 0;
    if (shape->window > 0 && num_keys > shape->window) begin = num_keys - shape->window;
    const int64_t num_blocks = (num_keys + block_size - 1) / block_size;
    const int64_t row_bytes = size * sizeof(ELEMENT);
    const int64_t stride = shape->num_kv_heads * size;
    for (int64_t block = begin / block_size; block < num_blocks; block++) {
        const ELEMENT *keys = cache + table[block] * shape->block_stride;
        const ELEMENT *values = keys + shape->value_offset;
        if (block + 1 < num_blocks) {
            const ELEMENT *next = cache + table[block + 1] * shape->block_stride;
            for (int64_t key = 0; key < block_size; key++) {
                fetch(next + key * stride, row_bytes);
                fetch(next + shape->value_offset + key * stride, row_bytes);
            }
        }
        const int64_t origin = block * block_size;
        const int64_t first = begin > origin ? begin - origin : 0;
        const int64_t stop = num_keys - origin < block_size ? num_keys - origin : block_size;
        NAME(score_block)(shape, q, keys, group, first, stop, scores);
        for (int64_t g = 0; g < group; g++) {
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
            NAME(add_values)(shape, scores[g], values, first, stop, totals + g * size);
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int64_t i = 0; i < size; i++)
            NAME(store)(out + g * size + i, totals[g * size + i] / sums[g]);
}

/* `query` and `out` are rows of all heads; `cache` begins at the layer's keys of block 0. */
void NAME(paged_decode)(
    const Shape *shape, const ELEMENT *query, const ELEMENT *cache, const int32_t *tables,
    const int32_t *num_keys, const float *slopes, ELEMENT *out) {
    const int64_t heads = shape->num_heads / shape->num_kv_heads;
    const int64_t num_items = shape->num_sequences * shape->num_kv_heads;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t item = 0; item < num_items; item++) {
        const int64_t sequence = item / shape->num_kv_heads, head = item % shape->num_kv_heads;
        for (int64_t g = 0; g < heads; g += MAX_GROUP) {
            const int64_t group = heads - g < MAX_GROUP ? heads - g : MAX_GROUP;
            const int64_t column = (head * heads + g) * shape->head_size;
            NAME(attend)(
                shape, query + sequence * shape->query_stride + column,
                cache + head * shape->head_size, tables + sequence * shape->table_stride,
                num_keys[sequence], slopes ? slopes + head * heads + g : 0, group,
                out + sequence * shape->out_stride + column);
        }
    }
}
