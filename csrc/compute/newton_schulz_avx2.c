/* Tiles of 3 rows with AVX2: 12 vectors of sums. */
#if defined(__x86_64__)

#include <immintrin.h>

#define VECTOR_BYTES 32
#define ROWS 3
#define NAME "avx2"
#define KERNEL lh_newton_schulz_avx2

#include "compute/zo_vectors.h"

static INLINE floats splat(float a)
{
    return (floats)_mm256_set1_ps(a);
}

static INLINE floats fma_of(floats a, floats b, floats c)
{
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

#include "compute/newton_schulz_body.h"

#endif
