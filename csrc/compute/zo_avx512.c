/* z with AVX-512, sixteen at a time. */
#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>

#define VECTOR_BYTES 64
#define KERNEL lh_zo_avx512

typedef uint64_t longs __attribute__((vector_size(VECTOR_BYTES)));

static inline __attribute__((always_inline)) longs multiply32(longs left, longs right)
{
    return (longs)_mm512_mul_epu32((__m512i)left, (__m512i)right);
}

static inline __attribute__((always_inline)) __m512 root(__m512 value)
{
    return _mm512_sqrt_ps(value);
}

#include "compute/zo_body.h"

#endif
