/* The GEMM with AMX and weights that are packed for it. */
#if defined(__AMX_BF16__) || defined(EMULATE_AMX)
#define TILE 32
#define AMX
#include "packed_gemm_tiles.h"
#endif
