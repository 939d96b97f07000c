/*
 * Attention of prompts, or parts of them, over the paged cache, on the CPU.
 *
 * A work item is a tile of adjacent queries of one sequence and the query heads of one KV head: its
 * rows. It reads KEYS keys at a time, transposes them, so that a vector holds the scores of LANES
 * keys, and computes the softmax online (Milakov and Gimelshein, 2018). The keys that are read
 * together begin at multiples of KEYS, whatever the queries, so a row has the same result in each
 * step that computes it.
 *
 * The library is empty without AVX2.
 */
#ifdef __AVX2__
#include "paged_prefill.h"
#include "paged_prefill_vectors.h"
#include "paged_prefill_weights.h"

#define ELEMENT float
#define NAME(x) x##_float
#include "paged_prefill_body.h"
#undef ELEMENT
#undef NAME

#define ELEMENT uint16_t
#define NAME(x) x##_bfloat
#include "paged_prefill_body.h"
#endif
