/*
 * One function of finite_copy.c. Returns 1 if all values are finite, that is if none has all bits
 * of the exponent set; 0 otherwise. The rows of both are strided.
 */
int64_t NAME(
    const FROM *from, int64_t from_stride, TO *to, int64_t to_stride, int64_t num_rows,
    int64_t size, uint32_t exponent) {
    const FROM bits = (FROM)exponent;
    FROM found = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        const FROM *restrict x = from + row * from_stride;
        TO *restrict y = to + row * to_stride;
        for (int64_t i = 0; i < size; i++) {
            y[i] = CONVERT(x[i]);
            found |= (FROM)((x[i] & bits) == bits);
        }
    }
    return !found;
}
