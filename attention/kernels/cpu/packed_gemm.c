/* The GEMM with weights that are packed for it. */
#define TILE 32
#include "packed_gemm_tiles.h"
