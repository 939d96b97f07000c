/*
 * Tokens drawn from rows of scores, on the CPU: the highest sum of a score over the temperature and
 * the token's noise, which `workers.sampling.noise` defines to the last bit.
 *
 * A bound of the noise takes a few instructions, for all lanes of a vector. Only the few tokens of
 * which the bound exceeds the highest sum so far get their exact noise.
 */
#include <math.h>

#include "lanes.h"

#define CHUNK 128
#define LARGEST_NOISE 22.2f
#define LOG_2 0.6931471805599453f
#define ID_FACTOR 0x9e3779b9u
/* log(2) * (127 + 31) and more than the rounding of a bound. */
#define BOUND_START 109.5183f
#define LAST 0x7fffffff

typedef struct {
    float scale; /* 1 / temperature */
    uint32_t low, high; /* of the key */
} Draw;

static inline Draw draw_of(float scale, uint64_t key) {
    return (Draw){scale, (uint32_t)key, (uint32_t)(key >> 32)};
}

/* A number that is rounded before its use: no compiler fuses or reorders across it. */
static inline float rounded(float number) {
    volatile float stored = number;
    return stored;
}

static inline float log_of(float exponent, float part) {
    static const float coefficients[] = {
        -0.06638092547655106f, 0.14094771444797516f, -0.17339035868644714f, 0.20101404190063477f,
        -0.24979183077812195f, 0.33330535888671875f, -0.500001847743988f,
    };
    float sum = coefficients[0];
    for (int i = 1; i < 7; i++) sum = rounded(rounded(sum * part) + coefficients[i]);
    const float low = rounded(rounded(part * part) * sum);
    return rounded(rounded(low + part) + rounded(exponent * LOG_2));
}

/* The e and x of a number (1 + x) * 2^e, with x in [-1/4, 1/2). */
static inline float split(float number, float *exponent) {
    int32_t bits;
    memcpy(&bits, &number, sizeof bits);
    const int32_t whole = (bits - 0x3f400000) >> 23;
    bits -= whole * (1 << 23);
    memcpy(&number, &bits, sizeof bits);
    *exponent = (float)whole;
    return rounded(number - 1.0f);
}

static float noise_of(Draw draw, uint32_t id) {
    uint32_t word = id * ID_FACTOR + draw.low;
    word = (word ^ (word >> 16)) * 0x21f0aaadu;
    word = (word ^ (word >> 15) ^ draw.high) * 0xd35a2d97u;
    word = (word ^ (word >> 15)) >> 1;
    float exponent;
    float part = split(rounded((float)(int32_t)(LAST - word) + 0.5f) * 0x1p-31f, &exponent);
    if (word < 1u << 29) part = rounded((float)(int32_t)word + 0.5f) * -0x1p-31f;
    part = split(-log_of(exponent, part), &exponent);
    return -log_of(exponent, part);
}

/* Writes bounds of the sums of a chunk of tokens, and returns the largest. */
INLINE float bound_sums(Draw draw, const uint32_t *ids, const float *products, float *bounds) {
    Floats most = (Floats){0} - INFINITY;
    for (int i = 0; i < CHUNK; i += LANES) {
        Words words = *(const Words *)(ids + i) * ID_FACTOR + draw.low;
        words = (words ^ (words >> 16)) * 0x21f0aaadu;
        words = (words ^ (words >> 15) ^ draw.high) * 0xd35a2d97u;
        words = (words ^ (words >> 15)) >> 1;
        const Floats numbers = __builtin_convertvector((Ints)words, Floats) + 0.5f;
        /* The noise is at most -log(v), and log2(v) at least as linear in the bits of v. */
        const Floats logs = __builtin_convertvector((Ints)numbers, Floats) * (LOG_2 * 0x1p-23f);
        const Floats bound = load_float(products + i) + (BOUND_START - logs);
        store_all_float(bounds + i, bound);
        most = larger(most, bound);
    }
    return largest_of(most);
}

INLINE Floats load(const void *scores, int64_t i, int is_bfloat) {
    return is_bfloat ? load_bfloat((const uint16_t *)scores + i)
                     : load_float((const float *)scores + i);
}

/* Writes the scores of a chunk over the temperature, and returns the largest, NaN if any is NaN. */
INLINE float scale_chunk(const void *scores, int64_t first, int is_bfloat, float scale, float *to) {
    Floats most = (Floats){0} - INFINITY;
    Ints are_sound = (Ints){0} - 1;
    for (int i = 0; i < CHUNK; i += LANES) {
        const Floats products = load(scores, first + i, is_bfloat) * scale;
        store_all_float(to + i, products);
        most = larger(most, products);
        are_sound &= products < INFINITY;
    }
    int32_t is_sound = -1;
    for (int i = 0; i < LANES; i++) is_sound &= are_sound[i];
    return is_sound ? largest_of(most) : NAN;
}

/*
 * The highest sum and its lowest id, as Choice.local_maxima returns them. The ids of the tokens are
 * `ids`, or follow `first_id` if that is NULL.
 */
INLINE int64_t drawn_maximum(
    const void *scores, int64_t size, int is_bfloat, Draw draw, int64_t first_id,
    const uint32_t *ids) {
    float best = -INFINITY, products[CHUNK], bounds[CHUNK];
    uint32_t best_id = first_id, chunk_ids[CHUNK];
    for (int64_t first = 0; first < size; first += CHUNK) {
        const int num = size - first < CHUNK ? size - first : CHUNK;
        float most;
        if (num == CHUNK) {
            most = scale_chunk(scores, first, is_bfloat, draw.scale, products);
        } else {
            for (int i = 0; i < CHUNK; i++)
                bounds[i] = i >= num    ? -INFINITY
                            : is_bfloat ? one_bfloat((const uint16_t *)scores + first + i)
                                        : one_float((const float *)scores + first + i);
            most = scale_chunk(bounds, 0, 0, draw.scale, products);
        }
        if (most != most) return (int64_t)LAST << 32;
        if (!(most > -INFINITY && most + LARGEST_NOISE >= best)) continue;
        /* The products are read back, rounded, since no bound must be below a sum. */
        __asm__ volatile("" : : "r"(products) : "memory");
        for (int i = 0; i < CHUNK; i++)
            chunk_ids[i] = !ids ? first_id + first + i : i < num ? ids[first + i] : 0;
        if (!(bound_sums(draw, chunk_ids, products, bounds) >= best)) continue;
        for (int i = 0; i < CHUNK; i++) {
            if (!(bounds[i] >= best)) continue;
            const float sum = rounded(products[i]) + noise_of(draw, chunk_ids[i]);
            if (sum > best || (sum == best && chunk_ids[i] < best_id)) {
                best = sum;
                best_id = chunk_ids[i];
            }
        }
    }
    int32_t bits;
    memcpy(&bits, &best, sizeof bits);
    const int32_t key = best == 0.0f ? 0 : bits ^ ((bits >> 31) & LAST);
    return (int64_t)key * ((int64_t)1 << 32) | (LAST - best_id);
}

/*
 * Called by Draw in draw.py. scores `[num_scores][size]`, bfloat16 or float, with `stride` elements
 * from one to the next; rows, scales, keys, maxima `[num_rows]`.
 */
void drawn_maxima(
    const void *scores, int64_t stride, int64_t size, int64_t is_bfloat, const int64_t *rows,
    int64_t num_rows, const float *scales, const uint64_t *keys, int64_t first_id,
    int64_t *maxima) {
/* Waking a thread takes as long as some rows. */
#pragma omp parallel for schedule(static) if (num_rows >= 8)
    for (int64_t i = 0; i < num_rows; i++) {
        const Draw draw = draw_of(scales[i], keys[i]);
        const int64_t at = rows[i] * stride;
        maxima[i] = is_bfloat
                        ? drawn_maximum((const uint16_t *)scores + at, size, 1, draw, first_id, 0)
                        : drawn_maximum((const float *)scores + at, size, 0, draw, first_id, 0);
    }
}

/* Called by Draw in draw.py; returns the token drawn from tokens of a row, `[size]`, or -1. */
int64_t drawn_token(
    const float *scores, const uint32_t *ids, int64_t size, float scale, uint64_t key) {
    const int64_t maximum = drawn_maximum(scores, size, 0, draw_of(scale, key), 0, ids);
    const int64_t sum_key = maximum >> 32;
    return sum_key > -0x7f800001 && sum_key < 0x7f800000 ? LAST - (maximum & 0xffffffff) : -1;
}
