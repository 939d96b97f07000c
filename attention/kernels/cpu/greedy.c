/*
 * The most likely tokens of rows of bfloat16 scores, on the CPU.
 *
 * Scores are compared as keys, 16-bit integers that sort like them, so that a vector holds 32.
 */
#include <stdint.h>

#define PART 512 /* scores that are searched for the highest one */
/* Keys of infinities; those of NaN are below the one or above the other. */
#define INFINITE 0x7f80
#define NEGATIVE_INFINITE (-0x7f81)

static inline int16_t key_of(int16_t bits) {
    const int16_t key = bits ^ ((bits >> 15) & 0x7fff);
    /* -0.0 and 0.0 are equal. */
    return key == -1 ? 0 : key;
}

/* Returns the first of the highest scores, or -1 if one is NaN or infinite, or all are -infinity. */
static int64_t first_highest(const int16_t *scores, int64_t size) {
    int16_t highest = INT16_MIN, lowest = INT16_MAX;
    int64_t found = 0;
    for (int64_t first = 0; first < size; first += PART) {
        const int64_t stop = first + PART < size ? first + PART : size;
        int16_t most = INT16_MIN, least = INT16_MAX;
        for (int64_t i = first; i < stop; i++) {
            const int16_t key = key_of(scores[i]);
            most = key > most ? key : most;
            least = key < least ? key : least;
        }
        if (most > highest) {
            highest = most;
            found = first;
        }
        lowest = least < lowest ? least : lowest;
    }
    if (highest >= INFINITE || highest <= NEGATIVE_INFINITE || lowest < NEGATIVE_INFINITE) return -1;
    while (key_of(scores[found]) != highest) found++;
    return found;
}

/*
 * Called by Greedy in greedy.py. scores `[num_scores][size]`, with `stride` elements from one to the
 * next; rows, tokens `[num_rows]`.
 */
void greedy(
    const int16_t *scores, int64_t stride, int64_t size, const int64_t *rows, int64_t num_rows,
    int64_t *tokens) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < num_rows; i++)
        tokens[i] = first_highest(scores + rows[i] * stride, size);
}
