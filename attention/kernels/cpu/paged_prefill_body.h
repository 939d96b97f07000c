/* The kernel of paged_prefill.c for one element type; included once for each. */

/* Loads LANES elements of a key or value. */
INLINE Floats NAME(load_cached)(const int64_t format, const char *from) {
    if (format == E4M3) return load_e4m3((const uint8_t *)from);
    if (format == E5M2) return load_e5m2((const uint8_t *)from);
    return NAME(load)((const ELEMENT *)from);
}

/* Loads up to LANES elements of a key or value; those after the last of `num_left` are zero. */
INLINE Floats NAME(load_part)(
    const int64_t format, const char *from, int64_t width, int64_t num_left) {
    if (num_left >= LANES) return NAME(load_cached)(format, from);
    char rest[LANES * sizeof(ELEMENT)] = {0};
    if (num_left > 0) memcpy(rest, from, num_left * width);
    return NAME(load_cached)(format, rest);
}

/*
 * Reads KEYS keys and values from key `first` of a sequence on. Those before `begin` and from `stop`
 * on become zero, since what the cache has there may not be finite. `is_whole` if there are none,
 * and no part of a vector.
 */
INLINE void NAME(read_rows)(
    const Shape *shape, const char *cache, const int32_t *table, int64_t first, int64_t begin,
    int64_t stop, const int64_t format, const int is_whole, const Room *room) {
    const int64_t size = shape->head_size, width = format == SAME ? sizeof(ELEMENT) : 1;
    const char *rows[KEYS];
    int is_read[KEYS];
    for (int64_t key = 0; key < KEYS; key++) {
        is_read[key] = is_whole || (first + key >= begin && first + key < stop);
        const int64_t place = is_read[key] ? first + key : stop - 1;
        rows[key] = cache + (table[place / shape->block_size] * shape->block_stride +
                             place % shape->block_size * shape->num_kv_heads * size) *
                                width;
    }
    for (int64_t i = 0; i < room->size; i += LANES) {
        const int64_t left = is_whole ? LANES : size - i;
        for (int64_t part = 0; part < KEYS; part += LANES) {
            Floats lanes[LANES];
            for (int64_t key = 0; key < LANES; key++) {
                const char *from = rows[part + key] + i * width;
                lanes[key] = NAME(load_part)(format, from, width, left);
                if (!is_whole && !is_read[part + key]) lanes[key] = (Floats){0};
            }
            put_keys(room, part, i, lanes);
        }
        for (int64_t key = 0; key < KEYS; key++) {
            const char *from = rows[key] + (shape->value_offset + i) * width;
            const Floats value =
                is_whole || is_read[key] ? NAME(load_part)(format, from, width, left) : (Floats){0};
            put_value(room, key, i, value);
        }
    }
}

INLINE void NAME(read_keys)(
    const Shape *shape, const char *cache, const int32_t *table, int64_t first, int64_t begin,
    int64_t stop, const int64_t format, const Room *room) {
    if (first >= begin && first + KEYS <= stop && shape->head_size == room->size)
        NAME(read_rows)(shape, cache, table, first, begin, stop, format, 1, room);
    else
        NAME(read_rows)(shape, cache, table, first, begin, stop, format, 0, room);
}

/* Attends for the queries of one work item; `position` is that of the first one. */
static void NAME(attend)(
    const Shape *shape, const ELEMENT *query, const char *cache, const int32_t *table,
    int64_t position, int64_t num_queries, const float *slopes, const float *sinks, ELEMENT *out,
    const Room *room) {
    const int64_t heads = shape->num_heads / shape->num_kv_heads, size = room->size;
    const int64_t num_rows = num_queries * heads, head_size = shape->head_size;
    for (int64_t row = 0; row < num_rows; row++) {
        const ELEMENT *from = query + row / heads * shape->query_stride + row % heads * head_size;
        for (int64_t i = 0; i < size; i += LANES) {
            const char *place = (const char *)(from + i);
            put_query(
                room, row, i, NAME(load_part)(SAME, place, sizeof(ELEMENT), head_size - i),
                shape->scale);
        }
        /* A sink is a score without a value. */
        room->tops[row] = sinks ? sinks[row % heads] : -INFINITY;
        room->sums[row] = sinks ? 1.0f : 0.0f;
    }
    memset(room->totals, 0, num_rows * size * sizeof(float));
    const int64_t stop = position + num_queries, window = shape->window;
    const int64_t begin = window > 0 && position >= window ? position - window + 1 : 0;
    for (int64_t first = begin - begin % KEYS; first < stop; first += KEYS) {
        if (shape->format == SAME)
            NAME(read_keys)(shape, cache, table, first, begin, stop, SAME, room);
        else if (shape->format == E4M3)
            NAME(read_keys)(shape, cache, table, first, begin, stop, E4M3, room);
        else
            NAME(read_keys)(shape, cache, table, first, begin, stop, E5M2, room);
        /* Earlier queries see none of the keys, and the windows of some later ones begin after. */
        const int64_t seen_until = window > 0 ? first + KEYS + window - 1 : stop;
        const Step step = {
            .first_row = first > position ? (first - position) * heads : 0,
            .stop_row = seen_until < stop ? (seen_until - position) * heads : num_rows,
            .heads = heads,
            .position = position - first,
        };
        score_keys(room, step.first_row, step.stop_row, shape->scale);
        weigh_rows(shape, room, &step, slopes);
        add_values(
            room, step.first_row, step.stop_row, stop - first < KEYS ? stop - first : KEYS);
    }
    for (int64_t row = 0; row < num_rows; row++) {
        ELEMENT *to = out + row / heads * shape->out_stride + row % heads * head_size;
        const float factor = shape->value_scale / room->sums[row];
        for (int64_t i = 0; i < head_size; i++)
            NAME(store)(to + i, room->totals[row * size + i] * factor);
    }
}

/*
 * Called by PagedPrefill in paged_prefill.py. query, out `[num_tokens][num_heads * head_size]`,
 * strided; cache points to the layer's keys in block 0; tables `[num_sequences][table_stride]`;
 * num_keys, num_queries and starts (the token of the first query) `[num_sequences]`; items
 * `[num_items]`, each of up to `max_queries`; slopes and sinks `[num_heads]` or null. Returns 1
 * if there is no memory.
 */
int NAME(paged_prefill)(
    const Shape *shape, const ELEMENT *query, const char *cache, const int32_t *tables,
    const int32_t *num_keys, const int32_t *num_queries, const int32_t *starts, const Item *items,
    int64_t num_items, int64_t max_queries, const float *slopes, const float *sinks,
    ELEMENT *out) {
    const int64_t size = shape->head_size, heads = shape->num_heads / shape->num_kv_heads;
    const int64_t num_rows = max_queries * heads;
    const int64_t row_bytes = size * width_of(shape, sizeof(ELEMENT));
    int failed = 0;
#pragma omp parallel
    {
        Room room;
        char *memory = aligned_alloc(LINE, (int64_t)divide_room(&room, 0, shape, num_rows));
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
        divide_room(&room, memory, shape, num_rows);
        BEGIN();
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_items * shape->num_kv_heads; i++) {
            if (!memory) continue;
            const Item item = items[i / shape->num_kv_heads];
            const int64_t kv = i % shape->num_kv_heads, column = kv * heads * size;
            const int64_t sequence = item.sequence, token = starts[sequence] + item.first_query;
            const int64_t left = num_queries[sequence] - item.first_query;
            NAME(attend)(
                shape, query + token * shape->query_stride + column, cache + kv * row_bytes,
                tables + sequence * shape->table_stride,
                num_keys[sequence] - num_queries[sequence] + item.first_query,
                left < max_queries ? left : max_queries, slopes ? slopes + kv * heads : 0,
                sinks ? sinks + kv * heads : 0, out + token * shape->out_stride + column, &room);
        }
        END();
        free(memory);
    }
    return failed;
}
