/* Included by paged_decode.c once for each element type. */

/* The keys and values of one KV head of a block, row by row. */
typedef struct {
    const ELEMENT *keys, *values;
    int64_t stride;
} NAME(Block);

/* Scores of the keys of one block, `scores[g][key]`, and -infinity for those that are not seen. */
INLINE void NAME(score_block)(
    int64_t size, const ELEMENT *query, const ELEMENT *keys, int64_t stride, const int group,
    int64_t first, int64_t stop, float scores[][ROW]) {
    const int64_t whole = size - size % STEP;
    for (int64_t key = first - first % 4; key < stop; key += 4) {
        /* Four keys at a time; what is beyond the last one is scored and then hidden. */
        const ELEMENT *rows[4];
        for (int k = 0; k < 4; k++) rows[k] = keys + (key + k < stop ? key + k : key) * stride;
        Floats sums[GROUP][4];
        for (int g = 0; g < group; g++)
            for (int k = 0; k < 4; k++) sums[g][k] = (Floats){0};
        for (int64_t i = 0; i < whole; i += STEP) {
            NAME(Step) lanes[4];
            for (int k = 0; k < 4; k++) lanes[k] = NAME(step)(rows[k] + i);
            for (int g = 0; g < group; g++) {
                const NAME(Step) q = NAME(step)(query + g * size + i);
                for (int k = 0; k < 4; k++) sums[g][k] = NAME(add_step)(sums[g][k], q, lanes[k]);
            }
        }
        for (int g = 0; g < group; g++) {
            float *score = scores[g] + key;
            sums_of_four(sums[g][0], sums[g][1], sums[g][2], sums[g][3], score);
            for (int64_t i = whole; i < size; i++)
                for (int k = 0; k < 4; k++)
                    score[k] += NAME(one)(query + g * size + i) * NAME(one)(rows[k] + i);
        }
    }
    for (int g = 0; g < group; g++) {
        for (int64_t key = 0; key < first; key++) scores[g][key] = -INFINITY;
        *(Floats *)(scores[g] + stop) = (Floats){} - INFINITY;
    }
}

/* Adds the weighted values of a block to `totals`, one row of `head_size` for each head. */
INLINE void NAME(add_values)(
    int64_t size, float weights[][ROW], const ELEMENT *values, int64_t stride, const int group,
    int64_t first, int64_t stop, float *totals) {
    const int64_t whole = size - size % LANES;
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

/* One block for some query heads that share a KV head: brings their softmax up to date. */
INLINE void NAME(attend_block)(
    const Shape *shape, const ELEMENT *query, NAME(Block) block, const float *slopes,
    const int group, Span span, Softmax *softmax, float *totals) {
    const int64_t size = shape->head_size, first = span.first, stop = span.stop;
    float scores[GROUP][ROW];
    NAME(score_block)(size, query, block.keys, block.stride, group, first, stop, scores);
    for (int g = 0; g < group; g++) {
        adjust(shape, scores[g], slopes ? slopes + g : 0, span);
        const float top = top_of(scores[g], stop);
        if (top > softmax[g].top) {
            const float shrink =
                softmax[g].top == -INFINITY ? 0.0f : expf(softmax[g].top - top);
            for (int64_t i = 0; i < size; i++) totals[g * size + i] *= shrink;
            softmax[g].sum *= shrink;
            softmax[g].top = top;
        }
        softmax[g].sum += weigh(scores[g], stop, softmax[g].top);
    }
    NAME(add_values)(size, scores, block.values, block.stride, group, first, stop, totals);
}

/* A row of fp8 numbers as elements. */
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

/* One KV head of a block of fp8 numbers, as far as it is read, widened into `room`. */
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
 * One sequence and the query heads of some neighbouring KV heads. A block's rows of these heads
 * lie side by side: they are read together, and each head keeps a softmax of its own.
 */
static void NAME(attend)(
    const Shape *shape, const ELEMENT *query, const char *cache, const int32_t *table,
    int64_t num_keys, const float *slopes, int64_t num_kv_heads, ELEMENT *out) {
    const int64_t size = shape->head_size, block_size = shape->block_size;
    const int64_t width = width_of(shape, sizeof(ELEMENT)), row_bytes = size * width;
    ELEMENT room[shape->format == SAME ? 1 : 2 * block_size * size];
    const int64_t heads = shape->num_heads / shape->num_kv_heads, num_heads = heads * num_kv_heads;
    float totals[num_heads * size];
    Softmax softmax[num_heads];
    memset(totals, 0, sizeof totals);
    for (int64_t h = 0; h < num_heads; h++) softmax[h] = (Softmax){-INFINITY, 0.0f};
    const int64_t begin =
        shape->window > 0 && num_keys > shape->window ? num_keys - shape->window : 0;
    const int64_t num_blocks = (num_keys + block_size - 1) / block_size;
    for (int64_t block = begin / block_size; block < num_blocks; block++) {
        const int64_t origin = block * block_size, left = num_keys - origin;
        const Span span = {
            .first = begin > origin ? begin - origin : 0,
            .stop = left < block_size ? left : block_size,
            .offset = 1 - left,
        };
        for (int64_t kv = 0; kv < num_kv_heads; kv++) {
            const char *keys = cache + table[block] * shape->block_stride * width + kv * row_bytes;
            if (block + 1 < num_blocks)
                fetch_block(
                    shape, row_bytes,
                    cache + table[block + 1] * shape->block_stride * width + kv * row_bytes);
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

/* `query` and `out` are rows of all heads; `cache` begins at the layer's keys of block 0. */
void NAME(paged_decode)(
    const Shape *shape, const ELEMENT *query, const char *cache, const int32_t *tables,
    const int32_t *num_keys, const float *slopes, ELEMENT *out) {
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
            num_keys[sequence], slopes ? slopes + kv * heads : 0, left < part ? left : part,
            out + sequence * shape->out_stride + column);
    }
}
