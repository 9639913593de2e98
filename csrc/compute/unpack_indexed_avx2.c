/* Decode rows whose columns have scales of their own with AVX2: see unpack_indexed_body.h. */
#if defined(__x86_64__)

#include <string.h>

#include "compute/unpack_avx2.h"

#define LANES 8
#define INLINE inline __attribute__((always_inline))
#define INDEXED lh_unpack_indexed_avx2
#define INTEGERS lh_unpack_integers_avx2

typedef uint32_t words __attribute__((vector_size(32)));
typedef float floats __attribute__((vector_size(32)));

static INLINE floats fused(floats a, float b, floats c)
{
    return (floats)_mm256_fmadd_ps((__m256)a, _mm256_set1_ps(b), (__m256)c);
}

static INLINE floats larger(floats a, float b)
{
    return (floats)_mm256_max_ps((__m256)a, _mm256_set1_ps(b));
}

static INLINE floats settled_rounded(floats value, uint32_t rounding)
{
    return (floats)product((__m256)value, _mm256_set1_ps(1), rounding);
}

static INLINE words half_bits(floats value)
{
    return (words)_mm256_cvtepu16_epi32(half_rounded((__m256)value));
}

static INLINE void words_transpose(words *v)
{
    words_exchange((__m256i *)v);
}

static INLINE words bytes_widened(const uint8_t *bytes)
{
    return (words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)bytes));
}

static INLINE words high_halves(words first, words second)
{
    const __m256i both = _mm256_packus_epi32((__m256i)(first >> 16), (__m256i)(second >> 16));
    return (words)_mm256_permute4x64_epi64(both, 0xD8);
}

static INLINE void words_put(uint8_t *out, words value, bool is_past_caches)
{
    if (is_past_caches)
        _mm256_stream_si256((void *)out, (__m256i)value);
    else
        _mm256_storeu_si256((void *)out, (__m256i)value);
}

#include "compute/unpack_indexed_body.h"

#endif
