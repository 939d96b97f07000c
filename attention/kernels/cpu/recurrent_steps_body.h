/* The kernels of recurrent_steps.c for one element type; included once for each. */

/* The input of a segment at a position from its start; the state has the positions before it. */
INLINE const ELEMENT *NAME(conv_input)(
    const ELEMENT *x, int64_t stride, const ELEMENT *state, int64_t num_channels, int64_t before,
    int64_t position) {
    return position < 0 ? state + (position + before) * num_channels : x + position * stride;
}

/*
 * Convolves `count` channels of a segment of `num_tokens` tokens, and updates their state unless it
 * is kept.
 */
static void NAME(conv_channels)(
    const ELEMENT *x, int64_t stride, const ELEMENT *weight, const ELEMENT *bias, ELEMENT *state,
    ELEMENT *out, int64_t num_tokens, int64_t num_channels, int64_t width, int64_t count,
    int has_silu, int keeps_state) {
    const int64_t before = width - 1;
    float taps[WIDTH][CHANNELS], first[CHANNELS] = {0}, sums[CHANNELS] = {0};
    for (int64_t i = 0; i < count; i++) {
        if (bias) first[i] = NAME(one)(bias + i);
        for (int64_t tap = 0; tap < width; tap++) taps[tap][i] = NAME(one)(weight + i * width + tap);
    }
    for (int64_t token = 0; token < num_tokens; token++) {
        memcpy(sums, first, sizeof sums);
        for (int64_t tap = 0; tap < width; tap++) {
            const ELEMENT *input =
                NAME(conv_input)(x, stride, state, num_channels, before, token - before + tap);
            for (int64_t i = 0; i < count; i++) sums[i] += NAME(one)(input + i) * taps[tap][i];
        }
        if (has_silu)
            for (int64_t i = 0; i < count; i += LANES)
                store_all_float(sums + i, silu_of(load_float(sums + i)));
        for (int64_t i = 0; i < count; i++)
            NAME(store)(out + token * num_channels + i, sums[i]);
    }
    if (keeps_state) return;
    /* A column is written after columns before it, and read before. */
    for (int64_t column = 0; column < before; column++) {
        const ELEMENT *last = NAME(conv_input)(
            x, stride, state, num_channels, before, num_tokens - before + column);
        memmove(state + column * num_channels, last, count * sizeof(ELEMENT));
    }
}

/*
 * Called by causal_conv in recurrent_steps.py. Rows of `states`, `[width - 1][num_channels]` each,
 * and tokens of x are strided; tokens of `out` are not.
 */
void NAME(causal_conv)(
    const ELEMENT *x, int64_t stride, const ELEMENT *weight, const ELEMENT *bias, ELEMENT *states,
    int64_t row_stride, const int32_t *query_starts, const int32_t *rows, ELEMENT *out,
    int64_t num_segments, int64_t num_channels, int64_t width, int has_silu, int keeps_states) {
    const int64_t num_tiles = (num_channels + CHANNELS - 1) / CHANNELS;
    const int64_t num_tokens = query_starts[num_segments] - query_starts[0];
#pragma omp parallel for schedule(dynamic) if (num_tokens * num_channels > MANY)
    for (int64_t item = 0; item < num_segments * num_tiles; item++) {
        const int64_t segment = item / num_tiles, channel = item % num_tiles * CHANNELS;
        const int64_t first = query_starts[segment], length = query_starts[segment + 1] - first;
        if (rows[segment] < 0 || !length) continue;
        const int64_t left = num_channels - channel, count = left < CHANNELS ? left : CHANNELS;
        NAME(conv_channels)(
            x + first * stride + channel, stride, weight + channel * width,
            bias ? bias + channel : 0, states + rows[segment] * row_stride + channel,
            out + first * num_channels + channel, length, num_channels, width, count, has_silu,
            keeps_states);
    }
}

/* Copies a vector; if `is_unit`, divided by its length, and times a factor. */
INLINE void NAME(copy_unit)(
    const ELEMENT *from, float *to, int64_t size, float factor, int is_unit) {
    float squares = 0.0f;
    for (int64_t i = 0; i < size; i++) {
        to[i] = NAME(one)(from + i);
        squares += to[i] * to[i];
    }
    if (!is_unit) return;
    factor /= sqrtf(squares + 1e-6f);
    for (int64_t i = 0; i < size; i++) to[i] *= factor;
}

/* out = out / sqrt(mean(out^2) + eps) * weight * silu(z), for one head. */
static void NAME(gate_head)(
    ELEMENT *out, const ELEMENT *z, const float *weight, int64_t size, float eps) {
    float squares = 0.0f, gates[LANES] = {0};
    for (int64_t i = 0; i < size; i++) squares += NAME(one)(out + i) * NAME(one)(out + i);
    const float scale = 1.0f / sqrtf(squares / (float)size + eps);
    for (int64_t from = 0; from < size; from += LANES) {
        const int64_t count = size - from < LANES ? size - from : LANES;
        for (int64_t i = 0; i < count; i++) gates[i] = NAME(one)(z + from + i);
        store_all_float(gates, silu_of(load_float(gates)));
        for (int64_t i = 0; i < count; i++) {
            ELEMENT *one = out + from + i;
            NAME(store)(one, NAME(one)(one) * scale * weight[from + i] * gates[i]);
        }
    }
}

/*
 * A delta rule; or, with `skip`, a selective scan: keys are not normed, beta is the step size, and
 * the product of skip and value is added to the result. With z, the results are normed. Tokens of
 * chained segments are computed one by one, and states that are kept do not change.
 */
typedef struct {
    const ELEMENT *query, *key, *value, *z;
    const float *log_decay, *beta, *skip, *weight;
    void *states;
    const int32_t *query_starts, *rows;
    ELEMENT *out;
    int64_t query_stride, key_stride, value_stride, z_stride, row_stride;
    int64_t num_segments, num_key_heads, num_heads, key_size, value_size;
    int64_t is_chained, keeps_states;
    float scale, eps;
} NAME(Rule);

/*
 * Loads a chunk of `count` tokens: queries, keys, the keys by column, the logarithms of the decay
 * since the start of the chunk, and the right sides of the system of a delta rule: beta v, and -beta
 * times the decay times k. The changes of a scan are beta v.
 */
static void NAME(load_chunk)(
    const NAME(Rule) *rule, int64_t token, int64_t head, int64_t count, Scratch *to) {
    const int64_t size = rule->key_size, value_size = rule->value_size, keys = to->keys;
    const int64_t group = head / (rule->num_heads / rule->num_key_heads) * size;
    const int is_delta = !rule->skip;
    memset(to->query, 0, sizeof(float) * (to->out - to->query));
    double decay = 0.0;
    for (int64_t i = 0; i < CHUNK; i++) {
        const int64_t place = (token + i) * rule->num_heads + head;
        if (i < count) decay += (double)rule->log_decay[place];
        to->decay[i] = decay;
        if (i >= count) continue;
        float *query = to->query + i * keys, *key = to->key + i * keys;
        float *change = to->changes + i * (keys + to->values);
        const ELEMENT *value = rule->value + (token + i) * rule->value_stride + head * value_size;
        NAME(copy_unit)(
            rule->query + (token + i) * rule->query_stride + group, query, size, rule->scale,
            is_delta);
        NAME(copy_unit)(
            rule->key + (token + i) * rule->key_stride + group, key, size, 1.0f, is_delta);
        const float beta = to->beta[i] = rule->beta[place], factor = -beta * expf((float)decay);
        for (int64_t j = 0; j < value_size; j++) change[j] = beta * NAME(one)(value + j);
        for (int64_t j = 0; j < size; j++) {
            to->key_columns[j * CHUNK + i] = key[j];
            if (is_delta) change[to->values + j] = factor * key[j];
        }
    }
}

/* Computes the changes and results of a chunk, and the state behind it. */
static void NAME(pass_chunk)(const NAME(Rule) *rule, int64_t count, Scratch *at) {
    const int64_t keys = at->keys, values = at->values, width = keys + values;
    const int64_t height = ROUNDED(count, ROWS);
    memset(at->seen, 0, sizeof at->seen);
    add_matrix(
        at->seen[0], CHUNK, at->query, keys, 1, at->key_columns, CHUNK, height, CHUNK, keys);
    decay_pairs(at->seen, at->decay, at->ones, count, 1);
    if (!rule->skip) {
        memset(at->system, 0, sizeof at->system);
        add_matrix(
            at->system[0], CHUNK, at->key, keys, 1, at->key_columns, CHUNK, height, CHUNK, keys);
        decay_pairs(at->system, at->decay, at->beta, count, 0);
        solve_rows(at->changes, width, at->system, count);
        add_matrix(
            at->changes, width, at->changes + values, width, 1, at->state, values, height, values,
            keys);
    }
    const double last = at->decay[CHUNK - 1];
    for (int64_t i = 0; i < count; i++) {
        const float before = expf((float)at->decay[i]), after = expf((float)(last - at->decay[i]));
        for (int64_t j = 0; j < keys; j++) {
            at->query[i * keys + j] *= before;
            at->key[i * keys + j] *= after;
        }
    }
    memset(at->out, 0, sizeof(float) * CHUNK * values);
    add_matrix(at->out, values, at->query, keys, 1, at->state, values, height, values, keys);
    add_matrix(
        at->out, values, at->seen[0], CHUNK, 1, at->changes, width, height, values, count);
    const float decay = expf((float)last);
    for (int64_t i = 0; i < keys * values; i++) at->state[i] *= decay;
    add_matrix(at->state, values, at->key, 1, keys, at->changes, width, keys, values, count);
}

/* Writes the results of a chunk. */
static void NAME(store_chunk)(
    const NAME(Rule) *rule, int64_t token, int64_t head, int64_t count, const Scratch *from) {
    const int64_t size = rule->value_size;
    for (int64_t i = 0; i < count; i++) {
        const float *row = from->out + i * from->values;
        const ELEMENT *value = rule->value + (token + i) * rule->value_stride + head * size;
        ELEMENT *out = rule->out + ((token + i) * rule->num_heads + head) * size;
        for (int64_t j = 0; j < size; j++)
            NAME(store)(
                out + j, rule->skip ? row[j] + rule->skip[head] * NAME(one)(value + j) : row[j]);
        if (rule->z)
            NAME(gate_head)(
                out, rule->z + (token + i) * rule->z_stride + head * size, rule->weight, size,
                rule->eps);
    }
}

#define STATE float
#define STATED(x) NAME(x##_float_states)
#define ONE_STATE one_float
#define STORE_STATE store_float
#include "recurrent_steps_states.h"
#undef STATE
#undef STATED
#undef ONE_STATE
#undef STORE_STATE

#define STATE uint16_t
#define STATED(x) NAME(x##_bfloat_states)
#define ONE_STATE one_bfloat
#define STORE_STATE store_bfloat
#include "recurrent_steps_states.h"
#undef STATE
#undef STATED
#undef ONE_STATE
#undef STORE_STATE
