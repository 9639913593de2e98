/* z with AVX2, eight at a time. */
#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>

#define VECTOR_BYTES 32
#define KERNEL lh_zo_avx2

typedef uint64_t longs __attribute__((vector_size(VECTOR_BYTES)));

static inline __attribute__((always_inline)) longs multiply32(longs left, longs right)
{
    return (longs)_mm256_mul_epu32((__m256i)left, (__m256i)right);
}

static inline __attribute__((always_inline)) __m256 root(__m256 value)
{
    return _mm256_sqrt_ps(value);
}

#include "compute/zo_body.h"

#endif
