/* Moments in 8 bits and in bf16 with AVX2, eight elements at a time. */
#if defined(__x86_64__)

#include <immintrin.h>
#include <stdbool.h>

#define VECTOR_BYTES 32
#define REGISTER "+x"
#define DECODE lh_adam_8bit_decode_avx2
#define ENCODE lh_adam_8bit_encode_avx2
#define ROUND_BF16 lh_adam_round_bf16_avx2
#define DECODE_REF lh_adam_8bit_decode_ref
#define ENCODE_REF lh_adam_8bit_encode_ref

#include "compute/zo_vectors.h"

static INLINE words lesser(words a, words b)
{
    return (words)_mm256_min_epi32((__m256i)a, (__m256i)b);
}

static INLINE words greater(words a, words b)
{
    return (words)_mm256_max_epi32((__m256i)a, (__m256i)b);
}

static INLINE uint32_t largest_of(words a)
{
    __m256i whole = (__m256i)a;
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4E));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xB1));
    return (uint32_t)_mm_cvtsi128_si32(most);
}

static INLINE words signed_load(const int8_t *source)
{
    __m128i bytes = _mm_loadl_epi64((const void *)source);
    return (words)_mm256_cvtepi8_epi32(bytes);
}

static INLINE floats unsigned_load(const uint8_t *source)
{
    __m128i bytes = _mm_loadl_epi64((const void *)source);
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
}

static INLINE void bytes_store(uint8_t *target, words codes)
{
    const __m256i low_bytes = _mm256_set1_epi32(0x0C080400);
    __m256i packed = _mm256_shuffle_epi8((__m256i)codes, low_bytes);
    __m128i low = _mm256_castsi256_si128(packed), high = _mm256_extracti128_si256(packed, 1);
    _mm_storel_epi64((void *)target, _mm_unpacklo_epi32(low, high));
}

static INLINE bool has_nan_code(const void *codes1, const void *codes2)
{
    const __m256i *first = codes1, *second = codes2;
    const __m256i nan1 = _mm256_set1_epi8(-128), nan2 = _mm256_set1_epi8(-1);
    __m256i found1 = _mm256_or_si256(_mm256_cmpeq_epi8(_mm256_loadu_si256(first), nan1),
                                     _mm256_cmpeq_epi8(_mm256_loadu_si256(first + 1), nan1));
    __m256i found2 = _mm256_or_si256(_mm256_cmpeq_epi8(_mm256_loadu_si256(second), nan2),
                                     _mm256_cmpeq_epi8(_mm256_loadu_si256(second + 1), nan2));
    return _mm256_movemask_epi8(_mm256_or_si256(found1, found2)) != 0;
}

/* Store the upper halves of all words. */
static INLINE void uppers_store(uint16_t *target, words low, words high)
{
    __m256i packed = _mm256_packus_epi32((__m256i)(low >> 16), (__m256i)(high >> 16));
    _mm256_storeu_si256((void *)target, _mm256_permute4x64_epi64(packed, 0xD8));
}

#include "compute/adam_8bit_body.h"
#include "compute/adam_bf16_body.h"

#endif
