/* Writes keys and values of tokens to the paged cache, on the CPU. */
#include <stdint.h>
#include <string.h>

#define MANY_TOKENS 64 /* fewer are written before other threads would begin */

/*
 * Called by CacheWrite in cache_write.py. keys and values are rows of `row_bytes` with a stride in
 * bytes; slots `[num_tokens]` are the rows of `cached_keys` and `cached_values` that they go to.
 */
void cache_write(
    const char *keys, int64_t key_stride, const char *values, int64_t value_stride,
    const int64_t *slots, int64_t num_tokens, int64_t row_bytes, char *cached_keys,
    char *cached_values) {
#pragma omp parallel for schedule(static) if (num_tokens >= MANY_TOKENS)
    for (int64_t token = 0; token < num_tokens; token++) {
        memcpy(cached_keys + slots[token] * row_bytes, keys + token * key_stride, row_bytes);
        memcpy(cached_values + slots[token] * row_bytes, values + token * value_stride, row_bytes);
    }
}
