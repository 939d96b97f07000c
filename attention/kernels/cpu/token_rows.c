/*
 * Element-wise work on token rows between GEMMs, on the CPU: the residual addition with the norm
 * that follows it, rotary embeddings and the gate of an MLP. For a few rows torch spends more time
 * on its calls than on the work.
 */
#include <math.h>

#include "lanes.h"

/* Number of elements above which several threads are faster than one. */
#define MANY 65536
/* The same for a gate, an exponential of each element. */
#define MANY_GATES 16384

#define ELEMENT float
#define NAME(x) x##_float
#include "token_rows_body.h"
#undef ELEMENT
#undef NAME

#define ELEMENT uint16_t
#define NAME(x) x##_bfloat
#include "token_rows_body.h"
