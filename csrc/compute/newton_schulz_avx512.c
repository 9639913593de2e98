/* Tiles of 12 rows with AVX-512: 24 vectors of sums. */
#if defined(__x86_64__)

#include <immintrin.h>

#define VECTOR_BYTES 64
#define ROWS 12
#define NAME "avx512"
#define KERNEL lh_newton_schulz_avx512

#include "compute/zo_vectors.h"

static INLINE floats splat(float a)
{
    return (floats)_mm512_set1_ps(a);
}

static INLINE floats fma_of(floats a, floats b, floats c)
{
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

#include "compute/newton_schulz_body.h"

#endif
