/* What kernels of attention over the paged cache know of layers and steps. */
#ifndef PAGEDRAY_PAGED_SHAPE_H
#define PAGEDRAY_PAGED_SHAPE_H

#include "lanes.h"

/* Element type of the cache: that of queries, or fp8. */
enum { SAME, E4M3, E5M2 };

/* As `_PagedShape` in paged_kernel.py. */
typedef struct {
    int64_t num_sequences;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_size;
    int64_t block_size;
    int64_t block_stride; /* elements from one block to the next */
    int64_t value_offset; /* elements from a key to its value */
    int64_t table_stride; /* entries from one block table to the next */
    int64_t query_stride; /* elements from one token's query to the next */
    int64_t out_stride;
    int64_t window; /* keys that a query sees, its own included; 0 is all */
    int64_t format;
    float scale;
    float value_scale;
    float soft_cap; /* 0 is none */
} Shape;

/* Bytes of an element of the cache if an element of a query has `width` bytes. */
INLINE int64_t width_of(const Shape *shape, int64_t width) {
    return shape->format == SAME ? width : 1;
}

#endif
