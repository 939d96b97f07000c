/* The GEMM with weights that oneDNN has packed for itself. */
#define TILE 64
#include "packed_gemm_tiles.h"
