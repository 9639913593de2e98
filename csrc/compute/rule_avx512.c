/* Every rule but AdamW with AVX-512, sixteen elements at a time. */
#if defined(__x86_64__)

#include <immintrin.h>

#define VECTOR_BYTES 64
#define TABLE lh_rule_avx512

#include "compute/zo_vectors.h"

typedef floats values;

static INLINE values splat(float a)
{
    return (values)_mm512_set1_ps(a);
}

static INLINE values fma_of(values a, values b, values c)
{
    return (values)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

static INLINE values root_of(values a)
{
    return (values)_mm512_sqrt_ps((__m512)a);
}

static INLINE values sign_of(values a)
{
    words above = (words)(a > 0), below = (words)(a < 0);
    words one = (words)splat(1), minus = (words)splat(-1);

    return (values)((above & one) | (below & minus));
}

static INLINE values halves_load(const uint16_t *source)
{
    return (values)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)source));
}

static INLINE void halves_store(uint16_t *target, values a)
{
    _mm256_storeu_si256((void *)target, _mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT));
}

#include "compute/rule_body.h"

#endif
