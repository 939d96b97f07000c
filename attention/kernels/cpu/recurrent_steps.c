/*
 * Layers with recurrent state on the CPU: causal convolutions, delta rules and selective scans.
 * Tokens of a segment are computed by chunks, and a token that is alone in its chunk by one pass
 * over its state.
 */
#include <math.h>
#include <stdlib.h>

#include "lanes.h"

/* Number of elements above which several threads are faster than one. */
#define MANY 65536
/* Largest width of a convolution. */
#define WIDTH 4
/* Channels that a thread convolves at a time, and the largest size of a key. */
#define CHANNELS 256
#define KEYS 512
/* As CHUNK_SIZE in arguments.py. */
#define CHUNK 64
/* The tile of a product in registers: rows, and vectors of a row. */
#define ROWS 4
#define VECTORS (LANES == 16 ? 4 : 2)

#define ROUNDED(size, to) (((size) + (to) - 1) / (to) * (to))

INLINE void add_tile(
    const int vectors, float *sums, int64_t row, const float *a, int64_t a_row, int64_t a_column,
    const float *b, int64_t b_row, int64_t depth) {
    Floats tile[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++) tile[r][v] = load_float(sums + r * row + v * LANES);
    for (int64_t k = 0; k < depth; k++) {
        Floats other[VECTORS];
        for (int v = 0; v < vectors; v++) other[v] = load_float(b + k * b_row + v * LANES);
        for (int r = 0; r < ROWS; r++) {
            const Floats one = (Floats){0} + a[r * a_row + k * a_column];
            for (int v = 0; v < vectors; v++) tile[r][v] = add_product(tile[r][v], one, other[v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++) store_all_float(sums + r * row + v * LANES, tile[r][v]);
}

/*
 * sums += a b, of `height` rows, a multiple of ROWS, and `width` columns, a multiple of LANES.
 * Element (i, k) of a is at `i * a_row + k * a_column`.
 */
static void add_matrix(
    float *sums, int64_t row, const float *a, int64_t a_row, int64_t a_column, const float *b,
    int64_t b_row, int64_t height, int64_t width, int64_t depth) {
    const int64_t whole = width / (VECTORS * LANES) * (VECTORS * LANES);
    for (int64_t j = 0; j < whole; j += VECTORS * LANES)
        for (int64_t i = 0; i < height; i += ROWS)
            add_tile(
                VECTORS, sums + i * row + j, row, a + i * a_row, a_row, a_column, b + j, b_row,
                depth);
    for (int64_t j = whole; j < width; j += LANES)
        for (int64_t i = 0; i < height; i += ROWS)
            add_tile(
                1, sums + i * row + j, row, a + i * a_row, a_row, a_column, b + j, b_row, depth);
}

/* pairs[i][j] *= factors[i] * exp(decay[i] - decay[j]) for j < i + `last`, and 0 for others. */
static void decay_pairs(
    float pairs[CHUNK][CHUNK], const double *decay, const float *factors, int64_t count,
    int64_t last) {
    float differences[CHUNK];
    for (int64_t i = 0; i < count; i++) {
        for (int64_t j = 0; j < CHUNK; j++) differences[j] = (float)(decay[i] - decay[j]);
        for (int64_t j = 0; j < CHUNK; j += LANES) {
            const Floats between = load_float(differences + j);
            const Ints is_below = between < 0.0f;
            const Floats scale = exp_below_zero((Floats)((Ints)between & is_below));
            store_all_float(pairs[i] + j, load_float(pairs[i] + j) * scale * factors[i]);
        }
        for (int64_t j = i + last; j < CHUNK; j++) pairs[i][j] = 0.0f;
    }
}

INLINE void solve_columns(
    const int vectors, float *rows, int64_t width, float system[CHUNK][CHUNK], int64_t count) {
    for (int64_t i = 1; i < count; i++) {
        Floats sums[VECTORS];
        for (int v = 0; v < vectors; v++) sums[v] = load_float(rows + i * width + v * LANES);
        for (int64_t j = 0; j < i; j++)
            for (int v = 0; v < vectors; v++)
                sums[v] -= load_float(rows + j * width + v * LANES) * system[i][j];
        for (int v = 0; v < vectors; v++) store_all_float(rows + i * width + v * LANES, sums[v]);
    }
}

/* Solves (I + system) x = rows in place, with a strictly lower triangular system. */
static void solve_rows(float *rows, int64_t width, float system[CHUNK][CHUNK], int64_t count) {
    const int64_t whole = width / (VECTORS * LANES) * (VECTORS * LANES);
    for (int64_t column = 0; column < whole; column += VECTORS * LANES)
        solve_columns(VECTORS, rows + column, width, system, count);
    for (int64_t column = whole; column < width; column += LANES)
        solve_columns(1, rows + column, width, system, count);
}

/* What a thread needs to compute chunks; all sizes are those of padded rows. */
typedef struct {
    float *query, *key, *key_columns, *changes, *state, *out;
    float seen[CHUNK][CHUNK], system[CHUNK][CHUNK];
    /* A sum of decays over a chunk is large beside the decay of one token. */
    double decay[CHUNK];
    float ones[CHUNK], beta[CHUNK];
    int64_t keys, values;
} Scratch;

static Scratch *make_scratch(int64_t key_size, int64_t value_size) {
    const int64_t keys = ROUNDED(key_size, LANES), values = ROUNDED(value_size, LANES);
    const int64_t total = CHUNK * (4 * keys + 2 * values) + keys * values;
    Scratch *scratch = calloc(1, sizeof(Scratch) + total * sizeof(float));
    if (!scratch) abort();
    scratch->keys = keys;
    scratch->values = values;
    scratch->query = (float *)(scratch + 1);
    scratch->key = scratch->query + CHUNK * keys;
    scratch->key_columns = scratch->key + CHUNK * keys;
    scratch->changes = scratch->key_columns + CHUNK * keys;
    scratch->out = scratch->changes + CHUNK * (keys + values);
    scratch->state = scratch->out + CHUNK * values;
    for (int64_t i = 0; i < CHUNK; i++) scratch->ones[i] = 1.0f;
    return scratch;
}

#define ELEMENT float
#define NAME(x) x##_float
#include "recurrent_steps_body.h"
#undef ELEMENT
#undef NAME

#define ELEMENT uint16_t
#define NAME(x) x##_bfloat
#include "recurrent_steps_body.h"
