/* Queries, keys and values of paged_prefill_amx.c in tiles of AMX. */
#include "amx.h"

#define PAIR 2     /* elements that a product of tiles adds together */
#define DEPTH 32   /* elements of a row of a tile */
#define COLUMNS 16 /* of the product of two tiles */
#define BEGIN() begin_tiles()
#define END() end_tiles()

/*
 * What a work item computes with. Columns after those of the head are zero. Rows are multiplied
 * sixteen at a time, so there is memory for more of them.
 */
typedef struct {
    int64_t size;      /* the head size in whole rows of a tile */
    uint16_t *queries; /* [rows][size] */
    float *totals;     /* [rows][size]: weighted sums of values */
    float *kept;       /* [TILE_ROWS][size]: totals that do not change */
    uint16_t *rows;    /* [KEYS][size]: the keys as they are read */
    float *keys;       /* [size / PAIR][KEYS]: pairs of elements */
    uint32_t *values;  /* [KEYS / PAIR][size]: pairs of keys */
    float *scores;     /* [rows][KEYS] */
    uint16_t *weights; /* [rows][KEYS] */
    float *tops;       /* [rows]: the largest score so far */
    float *sums;       /* [rows]: the sum of weights relative to it */
    float *shrinks;    /* [rows]: what the last keys change earlier weights by */
} Room;

/* Divides memory for some rows, and returns its end. From null on, the end is its size. */
INLINE char *divide_room(Room *room, char *memory, const Shape *shape, int64_t num_rows) {
    const int64_t size = rounded_up(shape->head_size, DEPTH);
    num_rows += TILE_ROWS;
    *room = (Room){
        .size = size,
        .queries = take(&memory, num_rows * size * sizeof(uint16_t)),
        .totals = take(&memory, num_rows * size * sizeof(float)),
        .kept = take(&memory, TILE_ROWS * size * sizeof(float)),
        .rows = take(&memory, KEYS * size * sizeof(uint16_t)),
        .keys = take(&memory, size / PAIR * KEYS * sizeof(float)),
        .values = take(&memory, KEYS / PAIR * size * sizeof(uint32_t)),
        .scores = take(&memory, num_rows * KEYS * sizeof(float)),
        .weights = take(&memory, num_rows * KEYS * sizeof(uint16_t)),
        .tops = take(&memory, num_rows * sizeof(float)),
        .sums = take(&memory, num_rows * sizeof(float)),
        .shrinks = take(&memory, num_rows * sizeof(float)),
    };
    return memory;
}

INLINE void put_query(const Room *room, int64_t row, int64_t i, Floats query, float scale) {
    (void)scale; /* of the scores */
    store_floats_bfloat(room->queries + row * room->size + i, query);
}

/* `keys` are LANES elements of LANES keys from `first` on. */
INLINE void put_keys(const Room *room, int64_t first, int64_t i, const Floats keys[LANES]) {
    uint16_t *rows = room->rows + first * room->size;
    for (int64_t key = 0; key < LANES; key++) store_floats_bfloat(rows + key * room->size + i, keys[key]);
    if ((i + LANES) % DEPTH) return;
    const int64_t begin = i + LANES - DEPTH;
    Floats pairs[LANES];
    for (int64_t key = 0; key < LANES; key++)
        pairs[key] = *(const Floats *)(rows + key * room->size + begin);
    transpose(pairs, room->keys + begin / PAIR * KEYS + first);
}

/* Keys come in order: the second of a pair is added to the first one. */
INLINE void put_value(const Room *room, int64_t key, int64_t i, Floats value) {
    Words *pairs = (Words *)(room->values + key / PAIR * room->size + i);
    const Words word = (Words)value;
    if (key % PAIR)
        *pairs |= word;
    else
        *pairs = word >> 16;
}

/* Writes the weights, which are rounded, beside the scores of a row. */
INLINE void put_weights(const Room *room, int64_t row, Floats first, Floats second) {
    store_all_bfloat(room->weights + row * KEYS, first);
    store_all_bfloat(room->weights + row * KEYS + LANES, second);
}

/* Multiplies sixteen rows, or twice as many if `is_tall`, by the keys. */
INLINE void score_rows(const Room *room, int64_t row, const int is_tall) {
    const int64_t size = room->size, row_bytes = size * sizeof(uint16_t);
    const int64_t key_bytes = KEYS * sizeof(float);
    const uint16_t *queries = room->queries + row * size;
    float *scores = room->scores + row * KEYS;
    ZERO_TILE(0);
    ZERO_TILE(1);
    if (is_tall) {
        ZERO_TILE(2);
        ZERO_TILE(3);
    }
    for (int64_t i = 0; i < size; i += DEPTH) {
        LOAD_TILE(4, queries + i, row_bytes);
        LOAD_TILE(6, room->keys + i / PAIR * KEYS, key_bytes);
        LOAD_TILE(7, room->keys + i / PAIR * KEYS + COLUMNS, key_bytes);
        ADD_TILES(0, 4, 6);
        ADD_TILES(1, 4, 7);
        if (is_tall) {
            LOAD_TILE(5, queries + TILE_ROWS * size + i, row_bytes);
            ADD_TILES(2, 5, 6);
            ADD_TILES(3, 5, 7);
        }
    }
    STORE_TILE(0, scores, key_bytes);
    STORE_TILE(1, scores + COLUMNS, key_bytes);
    if (is_tall) {
        STORE_TILE(2, scores + TILE_ROWS * KEYS, key_bytes);
        STORE_TILE(3, scores + TILE_ROWS * KEYS + COLUMNS, key_bytes);
    }
}

/* Multiplies rows by the keys. */
INLINE void score_keys(const Room *room, int64_t first_row, int64_t stop_row, float scale) {
    SYNC_TILES();
    for (int64_t row = first_row; row < stop_row; row += 2 * TILE_ROWS)
        if (stop_row - row > TILE_ROWS)
            score_rows(room, row, 1);
        else
            score_rows(room, row, 0);
    for (int64_t row = first_row; row < stop_row; row++)
        for (int64_t key = 0; key < KEYS; key += LANES) {
            float *scores = room->scores + row * KEYS + key;
            store_all_float(scores, load_float(scores) * scale);
        }
}

/* Adds the weighted values to some columns of sixteen rows, or twice as many if `is_tall`. */
INLINE void add_columns(const Room *room, int64_t row, int64_t i, const int is_tall) {
    const int64_t size = room->size, row_bytes = size * sizeof(float);
    const int64_t weight_bytes = KEYS * sizeof(uint16_t);
    const uint16_t *weights = room->weights + row * KEYS;
    const uint32_t *values = room->values + i;
    float *totals = room->totals + row * size + i;
    LOAD_TILE(0, totals, row_bytes);
    LOAD_TILE(1, totals + COLUMNS, row_bytes);
    LOAD_TILE(4, weights, weight_bytes);
    LOAD_TILE(6, values, row_bytes);
    LOAD_TILE(7, values + COLUMNS, row_bytes);
    ADD_TILES(0, 4, 6);
    ADD_TILES(1, 4, 7);
    STORE_TILE(0, totals, row_bytes);
    STORE_TILE(1, totals + COLUMNS, row_bytes);
    if (is_tall) {
        totals += TILE_ROWS * size;
        LOAD_TILE(2, totals, row_bytes);
        LOAD_TILE(3, totals + COLUMNS, row_bytes);
        LOAD_TILE(5, weights + TILE_ROWS * KEYS, weight_bytes);
        ADD_TILES(2, 5, 6);
        ADD_TILES(3, 5, 7);
        STORE_TILE(2, totals, row_bytes);
        STORE_TILE(3, totals + COLUMNS, row_bytes);
    }
}

/* Adds the weighted values of all keys to the totals of rows. */
INLINE void add_values(
    const Room *room, int64_t first_row, int64_t stop_row, int64_t num_keys) {
    const int64_t size = room->size;
    (void)num_keys; /* The others have no weight. */
    for (int64_t row = first_row; row < stop_row; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            float *totals = room->totals + row * size + i;
            store_all_float(totals, load_float(totals) * room->shrinks[row]);
        }
    /* Rows after the last one are multiplied with it, and some of them see none of the keys. */
    const int64_t num_rows = stop_row - first_row;
    const int64_t kept_bytes = (rounded_up(num_rows, TILE_ROWS) - num_rows) * size * sizeof(float);
    memcpy(room->kept, room->totals + stop_row * size, kept_bytes);
    SYNC_TILES();
    for (int64_t row = first_row; row < stop_row; row += 2 * TILE_ROWS)
        for (int64_t i = 0; i < size; i += 2 * COLUMNS)
            if (stop_row - row > TILE_ROWS)
                add_columns(room, row, i, 1);
            else
                add_columns(room, row, i, 0);
    memcpy(room->totals + stop_row * size, room->kept, kept_bytes);
}
