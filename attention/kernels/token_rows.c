/*
 * What happens to each token's row between products, on the CPU: the residual addition with the
 * norm that follows it, and the rotation of queries and keys. For a few rows these cost torch more
 * in calls than in work.
 */
#include <math.h>

#include "lanes.h"

/* Elements from which on a second thread pays. */
#define MANY 65536

#define ELEMENT float
#define NAME(x) x##_float
#include "token_rows_body.h"
#undef ELEMENT
#undef NAME

#define ELEMENT uint16_t
#define NAME(x) x##_bfloat
#include "token_rows_body.h"
