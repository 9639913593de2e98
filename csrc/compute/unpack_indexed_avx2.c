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

static INLINE floats fused_all(floats a, floats b, floats c)
{
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

static INLINE floats widened(words codes)
{
    return (floats)_mm256_cvtepi32_ps((__m256i)codes);
}

static INLINE words bytes_picked(words all, uint64_t part)
{
    const __m128i of_first =
        _mm_set_epi8(-1, -1, -1, 12, -1, -1, -1, 8, -1, -1, -1, 4, -1, -1, -1, 0);
    const __m256i at = _mm256_set_m128i(of_first, of_first);
    const __m256i picked = _mm256_add_epi8(at, _mm256_set1_epi32((int)part));
    return (words)_mm256_shuffle_epi8((__m256i)all, picked);
}

static INLINE words halves_widened(__m256i bytes, int part)
{
    const __m128i half =
        part == 0 ? _mm256_castsi256_si128(bytes) : _mm256_extracti128_si256(bytes, 1);
    return (words)_mm256_cvtepu16_epi32(half);
}

static INLINE words odd_chosen(words bits, uint32_t even, uint32_t odd)
{
    return (words)_mm256_blendv_ps((__m256)_mm256_set1_epi32((int)even),
                                   (__m256)_mm256_set1_epi32((int)odd), (__m256)(bits << 15));
}

static INLINE words high_joined(words low, words high)
{
    return (words)_mm256_blend_epi16((__m256i)(low >> 16), (__m256i)high, 0xAA);
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
