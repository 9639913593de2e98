/* Every rule but AdamW with AVX2, eight elements at a time. */
#if defined(__x86_64__)

#include <immintrin.h>

#define VECTOR_BYTES 32
#define TABLE lh_rule_avx2

#include "compute/zo_vectors.h"

typedef floats values;

static INLINE values splat(float a)
{
    return (values)_mm256_set1_ps(a);
}

static INLINE values fma_of(values a, values b, values c)
{
    return (values)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

static INLINE values root_of(values a)
{
    return (values)_mm256_sqrt_ps((__m256)a);
}

static INLINE values sign_of(values a)
{
    words above = (words)(a > 0), below = (words)(a < 0);
    words one = (words)splat(1), minus = (words)splat(-1);

    return (values)((above & one) | (below & minus));
}

static INLINE values halves_load(const uint16_t *source)
{
    return (values)_mm256_cvtph_ps(_mm_loadu_si128((const void *)source));
}

static INLINE void halves_store(uint16_t *target, values a)
{
    _mm_storeu_si128((void *)target, _mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT));
}

#include "compute/rule_body.h"

#endif
