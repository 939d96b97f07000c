/* The kernel of paged_decode.c for one element type; included once for each. */

/* The keys and values of one KV head of a block. */
typedef struct {
    const ELEMENT *keys, *values;
    int64_t stride;
} NAME(Block);

/* Computes the scores of the keys of a block, `scores[h][key]`, -infinity for hidden keys. */
INLINE void NAME(score_block)(
    int64_t size, const ELEMENT *query, const ELEMENT *keys, int64_t stride, const int num_heads,
    int64_t first, int64_t stop, float scores[][ROW]) {
    const int64_t whole = size - size % STEP;
    for (int64_t key = first - first % 4; key < stop; key += 4) {
        /* Four keys at a time; those after the last one repeat a key and are hidden below. */
        const ELEMENT *rows[4];
        for (int k = 0; k < 4; k++) rows[k] = keys + (key + k < stop ? key + k : key) * stride;
        Floats sums[HEADS][4];
        for (int h = 0; h < num_heads; h++)
            for (int k = 0; k < 4; k++) sums[h][k] = (Floats){0};
        for (int64_t i = 0; i < whole; i += STEP) {
            NAME(Step) lanes[4];
            for (int k = 0; k < 4; k++) lanes[k] = NAME(step)(rows[k] + i);
            for (int h = 0; h < num_heads; h++) {
                const NAME(Step) q = NAME(step)(query + h * size + i);
                for (int k = 0; k < 4; k++) sums[h][k] = NAME(add_step)(sums[h][k], q, lanes[k]);
            }
        }
        for (int h = 0; h < num_heads; h++) {
            float *score = scores[h] + key;
            sums_of_four(sums[h][0], sums[h][1], sums[h][2], sums[h][3], score);
            for (int64_t i = whole; i < size; i++)
                for (int k = 0; k < 4; k++)
                    score[k] += NAME(one)(query + h * size + i) * NAME(one)(rows[k] + i);
        }
    }
    for (int h = 0; h < num_heads; h++) {
        for (int64_t key = 0; key < first; key++) scores[h][key] = -INFINITY;
        *(Floats *)(scores[h] + stop) = (Floats){} - INFINITY;
    }
}

/* Adds the weighted values of a block to `totals`, `[num_heads][head_size]`. */
INLINE void NAME(add_values)(
    int64_t size, float weights[][ROW], const ELEMENT *values, int64_t stride, const int num_heads,
    int64_t first, int64_t stop, float *totals) {
    const int64_t whole = size - size % LANES;
    int64_t i = 0;
    for (; i + WIDE * LANES <= whole; i += WIDE * LANES) {
        Floats sums[HEADS][WIDE];
        for (int h = 0; h < num_heads; h++)
            for (int v = 0; v < WIDE; v++)
                sums[h][v] = load_float(totals + h * size + i + v * LANES);
        for (int64_t key = first; key < stop; key++) {
            const ELEMENT *row = values + key * stride + i;
            Floats lanes[WIDE];
            for (int v = 0; v < WIDE; v++) lanes[v] = NAME(load)(row + v * LANES);
            for (int h = 0; h < num_heads; h++)
                for (int v = 0; v < WIDE; v++) sums[h][v] += weights[h][key] * lanes[v];
        }
        for (int h = 0; h < num_heads; h++)
            for (int v = 0; v < WIDE; v++)
                *(Floats *)(totals + h * size + i + v * LANES) = sums[h][v];
    }
    for (; i < size; i++)
        for (int h = 0; h < num_heads; h++)
            for (int64_t key = first; key < stop; key++)
                totals[h * size + i] += weights[h][key] * NAME(one)(values + key * stride + i);
}

/* Updates the softmax of some query heads that share a KV head by one block. */
INLINE void NAME(attend_block)(
    const Shape *shape, const ELEMENT *query, NAME(Block) block, const float *slopes,
    const int num_heads, Span span, Softmax *softmax, float *totals) {
    const int64_t size = shape->head_size, first = span.first, stop = span.stop;
    float scores[HEADS][ROW];
    NAME(score_block)(size, query, block.keys, block.stride, num_heads, first, stop, scores);
    for (int h = 0; h < num_heads; h++) {
        adjust(shape, scores[h], slopes ? slopes + h : 0, span);
        const float top = top_of(scores[h], stop);
        if (top > softmax[h].top) {
            const float shrink =
                softmax[h].top == -INFINITY ? 0.0f : expf(softmax[h].top - top);
            for (int64_t i = 0; i < size; i++) totals[h * size + i] *= shrink;
            softmax[h].sum *= shrink;
            softmax[h].top = top;
        }
        softmax[h].sum += weigh(scores[h], stop, softmax[h].top);
    }
    NAME(add_values)(size, scores, block.values, block.stride, num_heads, first, stop, totals);
}

/* Widens the fp8 values of one head to elements. */
INLINE void NAME(widen_row)(int64_t format, const uint8_t *from, int64_t size, ELEMENT *to) {
    for (int64_t i = 0; i < size; i += LANES) {
        uint8_t rest[LANES] = {0};
        ELEMENT wide[LANES];
        const int is_whole = i + LANES <= size;
        if (!is_whole) memcpy(rest, from + i, size - i);
        const uint8_t *bytes = is_whole ? from + i : rest;
        const Floats values = format == E4M3 ? load_e4m3(bytes) : load_e5m2(bytes);
        NAME(store_floats)(is_whole ? to + i : wide, values);
        if (!is_whole) memcpy(to + i, wide, (size - i) * sizeof(ELEMENT));
    }
}

/* Widens the visible keys and values of one KV head of an fp8 block into `room`. */
INLINE NAME(Block) NAME(widen_block)(
    const Shape *shape, const uint8_t *keys, Span span, ELEMENT *room) {
    const int64_t size = shape->head_size, stride = shape->num_kv_heads * size;
    const int64_t format = shape->format;
    ELEMENT *values = room + shape->block_size * size;
    /* Keys are scored four at a time. */
    for (int64_t key = span.first - span.first % 4; key < span.stop; key++)
        NAME(widen_row)(format, keys + key * stride, size, room + key * size);
    keys += shape->value_offset;
    for (int64_t key = span.first; key < span.stop; key++)
        NAME(widen_row)(format, keys + key * stride, size, values + key * size);
    return (NAME(Block)){room, values, size};
}

/*
 * Attends for one sequence and the query heads of some adjacent KV heads, whose keys are adjacent
 * in a block and are read together. Each query head has its own softmax.
 */
static void NAME(attend)(
    const Shape *shape, const ELEMENT *query, const char *cache, const int32_t *table,
    int64_t num_keys, const float *slopes, const float *sinks, int64_t num_kv_heads,
    ELEMENT *out) {
    const int64_t size = shape->head_size, block_size = shape->block_size;
    const int64_t width = width_of(shape, sizeof(ELEMENT));
    ELEMENT room[shape->format == SAME ? 1 : 2 * block_size * size];
    const int64_t heads = shape->num_heads / shape->num_kv_heads, num_heads = heads * num_kv_heads;
    float totals[num_heads * size];
    Softmax softmax[num_heads];
    memset(totals, 0, sizeof totals);
    /* A sink is a score without a value. */
    for (int64_t h = 0; h < num_heads; h++)
        softmax[h] = sinks ? (Softmax){sinks[h], 1.0f} : (Softmax){-INFINITY, 0.0f};
    const int64_t begin =
        shape->window > 0 && num_keys > shape->window ? num_keys - shape->window : 0;
    const int64_t num_blocks = (num_keys + block_size - 1) / block_size;
    const int64_t first_block = begin / block_size;
    for (int64_t kv = 0; kv < num_kv_heads && first_block < num_blocks; kv++)
        fetch_block(shape, keys_of(shape, cache, table[first_block], kv, width), width);
    for (int64_t block = first_block; block < num_blocks; block++) {
        const int64_t origin = block * block_size, left = num_keys - origin;
        const Span span = {
            .first = begin > origin ? begin - origin : 0,
            .stop = left < block_size ? left : block_size,
            .offset = 1 - left,
        };
        for (int64_t kv = 0; kv < num_kv_heads; kv++) {
            const char *keys = keys_of(shape, cache, table[block], kv, width);
            if (block + 1 < num_blocks)
                fetch_block(shape, keys_of(shape, cache, table[block + 1], kv, width), width);
            const NAME(Block) rows =
                shape->format == SAME
                    ? (NAME(Block)){(const ELEMENT *)keys,
                                    (const ELEMENT *)keys + shape->value_offset,
                                    shape->num_kv_heads * size}
                    : NAME(widen_block)(shape, (const uint8_t *)keys, span, room);
            for (int64_t head = kv * heads, stop = head + heads; head < stop;) {
                const ELEMENT *q = query + head * size;
                const float *slope = slopes ? slopes + head : 0;
                float *total = totals + head * size;
                if (stop - head >= 4) {
                    NAME(attend_block)(shape, q, rows, slope, 4, span, softmax + head, total);
                    head += 4;
                } else if (stop - head >= 2) {
                    NAME(attend_block)(shape, q, rows, slope, 2, span, softmax + head, total);
                    head += 2;
                } else {
                    NAME(attend_block)(shape, q, rows, slope, 1, span, softmax + head, total);
                    head += 1;
                }
            }
        }
    }
    for (int64_t h = 0; h < num_heads; h++)
        for (int64_t i = 0; i < size; i++)
            NAME(store)(
                out + h * size + i, totals[h * size + i] / softmax[h].sum * shape->value_scale);
}

/*
 * Called by PagedDecode in paged_decode.py. query, out `[num_sequences][num_heads * head_size]`,
 * strided; cache points to the layer's keys in block 0; tables `[num_sequences][table_stride]`;
 * num_keys `[num_sequences]`; slopes and sinks `[num_heads]` or null.
 */
void NAME(paged_decode)(
    const Shape *shape, const ELEMENT *query, const char *cache, const int32_t *tables,
    const int32_t *num_keys, const float *slopes, const float *sinks, ELEMENT *out) {
    const int64_t heads = shape->num_heads / shape->num_kv_heads;
    const int64_t part = kv_heads_at_once(shape);
    const int64_t num_parts = (shape->num_kv_heads + part - 1) / part;
    const int64_t row_bytes = shape->head_size * width_of(shape, sizeof(ELEMENT));
#pragma omp parallel for schedule(dynamic)
    for (int64_t item = 0; item < shape->num_sequences * num_parts; item++) {
        const int64_t sequence = item / num_parts, kv = item % num_parts * part;
        const int64_t left = shape->num_kv_heads - kv, column = kv * heads * shape->head_size;
        NAME(attend)(
            shape, query + sequence * shape->query_stride + column,
            cache + kv * row_bytes, tables + sequence * shape->table_stride,
            num_keys[sequence], slopes ? slopes + kv * heads : 0,
            sinks ? sinks + kv * heads : 0, left < part ? left : part,
            out + sequence * shape->out_stride + column);
    }
}
