/* Queries, keys and values of paged_prefill.c in vectors of floats. */
/* Rows, and vectors of a value, at a time, so that their sums fit in registers. */
#ifdef __AVX512F__
#define ROWS 8
#define VALUE_ROWS 4
#define WIDE 4
#else
#define ROWS 6
#define VALUE_ROWS 6
#define WIDE 2
#endif
#define BEGIN()
#define END()

/* What a work item computes with. Columns after those of the head are zero. */
typedef struct {
    int64_t size;   /* the head size in whole vectors */
    float *queries; /* [rows][size], times the scale */
    float *totals;  /* [rows][size]: weighted sums of values */
    float *keys;    /* [size][KEYS] */
    float *values;  /* [KEYS][size] */
    float *scores;  /* [rows][KEYS], and then the weights */
    float *tops;    /* [rows]: the largest score so far */
    float *sums;    /* [rows]: the sum of weights relative to it */
    float *shrinks; /* [rows]: what the last keys change earlier weights by */
} Room;

/* Divides memory for some rows, and returns its end. From null on, the end is its size. */
INLINE char *divide_room(Room *room, char *memory, const Shape *shape, int64_t num_rows) {
    const int64_t size = rounded_up(shape->head_size, LANES), width = sizeof(float);
    const int64_t num_lanes = num_rows + LANES;
    *room = (Room){
        .size = size,
        .queries = take(&memory, num_rows * size * width),
        .totals = take(&memory, num_rows * size * width),
        .keys = take(&memory, size * KEYS * width),
        .values = take(&memory, KEYS * size * width),
        .scores = take(&memory, num_rows * KEYS * width),
        .tops = take(&memory, num_lanes * width),
        .sums = take(&memory, num_lanes * width),
        .shrinks = take(&memory, num_lanes * width),
    };
    return memory;
}

INLINE void put_query(const Room *room, int64_t row, int64_t i, Floats query, float scale) {
    store_all_float(room->queries + row * room->size + i, query * scale);
}

/* `keys` are LANES elements of LANES keys from `first` on. */
INLINE void put_keys(const Room *room, int64_t first, int64_t i, const Floats keys[LANES]) {
    transpose(keys, room->keys + i * KEYS + first);
}

INLINE void put_value(const Room *room, int64_t key, int64_t i, Floats value) {
    store_all_float(room->values + key * room->size + i, value);
}

/* Replaces the scores of a row. */
INLINE void put_weights(const Room *room, int64_t row, Floats first, Floats second) {
    store_all_float(room->scores + row * KEYS, first);
    store_all_float(room->scores + row * KEYS + LANES, second);
}

/* Multiplies some rows by the keys: `scores[row][key]`. */
INLINE void score_rows(
    int64_t size, const float *queries, const float *keys, const int num_rows, float *scores) {
    Floats sums[ROWS][2];
    for (int r = 0; r < num_rows; r++) sums[r][0] = sums[r][1] = (Floats){0};
    for (int64_t i = 0; i < size; i++) {
        const Floats first = load_float(keys + i * KEYS);
        const Floats second = load_float(keys + i * KEYS + LANES);
        for (int r = 0; r < num_rows; r++) {
            const Floats query = (Floats){0} + queries[r * size + i];
            sums[r][0] = add_product(sums[r][0], query, first);
            sums[r][1] = add_product(sums[r][1], query, second);
        }
    }
    for (int r = 0; r < num_rows; r++) {
        store_all_float(scores + r * KEYS, sums[r][0]);
        store_all_float(scores + r * KEYS + LANES, sums[r][1]);
    }
}

/* Multiplies rows by the keys. */
INLINE void score_keys(const Room *room, int64_t row, int64_t stop_row, float scale) {
    const int64_t size = room->size;
    (void)scale; /* of the queries already */
    for (; row + ROWS <= stop_row; row += ROWS)
        score_rows(
            size, room->queries + row * size, room->keys, ROWS, room->scores + row * KEYS);
    for (; row < stop_row; row++)
        score_rows(size, room->queries + row * size, room->keys, 1, room->scores + row * KEYS);
}

/* Adds the weighted values of the first `num_keys` keys to some rows of `totals`. */
INLINE void add_columns(
    int64_t size, const float *weights, const float *shrinks, const float *values,
    const int64_t num_keys, const int num_rows, const int num_vectors, float *totals) {
    Floats sums[VALUE_ROWS][WIDE];
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < num_vectors; v++)
            sums[r][v] = load_float(totals + r * size + v * LANES) * shrinks[r];
    for (int64_t key = 0; key < num_keys; key++)
        for (int v = 0; v < num_vectors; v++) {
            const Floats value = load_float(values + key * size + v * LANES);
            for (int r = 0; r < num_rows; r++) {
                const Floats weight = (Floats){0} + weights[r * KEYS + key];
                sums[r][v] = add_product(sums[r][v], weight, value);
            }
        }
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < num_vectors; v++)
            store_all_float(totals + r * size + v * LANES, sums[r][v]);
}

/* Adds the weighted values to all columns of some rows of `totals`. */
INLINE void add_rows(
    const Room *room, int64_t row, const int64_t num_keys, const int num_rows) {
    const float *weights = room->scores + row * KEYS, *shrinks = room->shrinks + row;
    const int64_t size = room->size;
    float *totals = room->totals + row * size;
    int64_t i = 0;
    for (; i + WIDE * LANES <= size; i += WIDE * LANES)
        add_columns(
            size, weights, shrinks, room->values + i, num_keys, num_rows, WIDE, totals + i);
    for (; i < size; i += LANES)
        add_columns(size, weights, shrinks, room->values + i, num_keys, num_rows, 1, totals + i);
}

/* Adds the weighted values of the first `num_keys` keys to the totals of rows. */
INLINE void add_values(const Room *room, int64_t row, int64_t stop_row, int64_t num_keys) {
    for (; row + VALUE_ROWS <= stop_row; row += VALUE_ROWS)
        add_rows(room, row, num_keys, VALUE_ROWS);
    for (; row < stop_row; row++) add_rows(room, row, num_keys, 1);
}
