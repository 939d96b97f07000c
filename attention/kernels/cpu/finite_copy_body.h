/*
 * One function of finite_copy.c. Returns 1 if all values are finite, that is if none has all bits
 * of the exponent set; 0 otherwise. The rows of both are strided.
 */
int64_t NAME(
    const FROM *from, int64_t from_stride, TO *to, int64_t to_stride, int64_t num_rows,
    int64_t size, uint32_t exponent) {
    const int64_t num_blocks = (size + BLOCK - 1) / BLOCK;
    const FROM bits = (FROM)exponent;
    int is_other = 0;
#pragma omp parallel for reduction(| : is_other) if (num_rows * size > BLOCK)
    for (int64_t block = 0; block < num_rows * num_blocks; block++) {
        const int64_t row = block / num_blocks, first = block % num_blocks * BLOCK;
        const int64_t end = first + BLOCK < size ? first + BLOCK : size;
        const FROM *restrict x = from + row * from_stride;
        TO *restrict y = to + row * to_stride;
        FROM found = 0;
        for (int64_t i = first; i < end; i++) {
            y[i] = CONVERT(x[i]);
            found |= (FROM)((x[i] & bits) == bits);
        }
        is_other |= found;
    }
    return !is_other;
}
