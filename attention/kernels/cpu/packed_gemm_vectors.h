/* The multipliers of packed_gemm_tiles.h in vectors. */
#if defined(__AVX512F__)
#define WIDTH 16
#define MICRO_ROWS (384 / TILE)
#elif defined(__AVX2__) && defined(__FMA__)
#define WIDTH 8
#define MICRO_ROWS (96 / TILE)
#else
#define WIDTH 4
#define MICRO_ROWS (96 / TILE)
#endif
#define VECTORS (TILE / WIDTH)
#define CHUNK 32
#define MOST_ROWS 96
#define SPARE_BYTES 0 /* that are read behind the last unit */
#define BEGIN()
#define END()

typedef float Part __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t PartWords __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

/* The rows of a strip: strips differ by one row at most. */
INLINE Range strip_of(int64_t num_rows, int64_t num_strips, int64_t strip) {
    return part_of(num_rows, num_strips, strip);
}

/* sums + x * y, as one instruction if there is one, which the compiler does not reassociate. */
INLINE Part add_scaled(Part sums, Part x, float y) {
#if defined(__AVX512F__)
    return (Part)_mm512_fmadd_ps((__m512)x, _mm512_set1_ps(y), (__m512)sums);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Part)_mm256_fmadd_ps((__m256)x, _mm256_set1_ps(y), (__m256)sums);
#else
    return ORDERED(sums + x * y);
#endif
}

/* `add_unit` multiplies a unit by a vector of a tile. */
typedef float Unit_float;
#define STEP_float 1

INLINE Part add_unit_float(Part sums, const float *weight, Unit_float x) {
    return add_scaled(sums, *(const Part *)weight, x);
}

INLINE Unit_float unit_float(const float *from) { return *from; }

#define STEP_bfloat 2
#ifdef __AVX512BF16__
typedef uint32_t Unit_bfloat;

INLINE Part add_unit_bfloat(Part sums, const uint16_t *weight, Unit_bfloat x) {
    return (Part)_mm512_dpbf16_ps(
        (__m512)sums, (__m512bh)_mm512_loadu_si512(weight), (__m512bh)_mm512_set1_epi32((int)x));
}

INLINE Unit_bfloat unit_bfloat(const uint16_t *from) {
    Unit_bfloat pair;
    memcpy(&pair, from, sizeof pair);
    return pair;
}
#else
typedef struct {
    float lower, upper;
} Unit_bfloat;

INLINE Part add_unit_bfloat(Part sums, const uint16_t *weight, Unit_bfloat x) {
    const PartWords words = *(const PartWords *)weight;
    sums = add_scaled(sums, (Part)(words << 16), x.lower);
    return add_scaled(sums, (Part)(words & 0xffff0000u), x.upper);
}

INLINE Unit_bfloat unit_bfloat(const uint16_t *from) {
    return (Unit_bfloat){one_bfloat(from), one_bfloat(from + 1)};
}
#endif
