/*
 * The attention of paged_prefill.c with AMX, for bfloat16. Weights are rounded to bfloat16 before
 * they multiply the values, and the sum that they are divided by is not, as in FlashAttention-2
 * (Dao, 2023). The library is empty if the compiler does not know AMX and AVX-512.
 */
#if defined(__AVX512F__) && (defined(__AMX_BF16__) || defined(EMULATE_AMX))
#include "paged_prefill.h"
#include "paged_prefill_amx.h"
#include "paged_prefill_weights.h"

#define ELEMENT uint16_t
#define NAME(x) x##_bfloat
#include "paged_prefill_body.h"
#endif
