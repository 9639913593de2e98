/* Moments in 8 bits and in bf16 with AVX-512, sixteen elements at a time. */
#if defined(__x86_64__)

#include <immintrin.h>
#include <stdbool.h>

#define VECTOR_BYTES 64
#define REGISTER "+v"
#define DECODE lh_adam_8bit_decode_avx512
#define ENCODE lh_adam_8bit_encode_avx512
#define ROUND_BF16 lh_adam_round_bf16_avx512
#define DECODE_REF lh_adam_8bit_decode_ref
#define ENCODE_REF lh_adam_8bit_encode_ref

#include "compute/zo_vectors.h"

static INLINE words lesser(words a, words b)
{
    return (words)_mm512_min_epi32((__m512i)a, (__m512i)b);
}

static INLINE words greater(words a, words b)
{
    return (words)_mm512_max_epi32((__m512i)a, (__m512i)b);
}

static INLINE uint32_t largest_of(words a)
{
    return (uint32_t)_mm512_reduce_max_epi32((__m512i)a);
}

static INLINE words signed_load(const int8_t *source)
{
    __m128i bytes = _mm_loadu_si128((const void *)source);
    return (words)_mm512_cvtepi8_epi32(bytes);
}

static INLINE floats unsigned_load(const uint8_t *source)
{
    __m128i bytes = _mm_loadu_si128((const void *)source);
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}

static INLINE void bytes_store(uint8_t *target, words codes)
{
    _mm_storeu_si128((void *)target, _mm512_cvtepi32_epi8((__m512i)codes));
}

static INLINE bool has_nan_code(const void *codes1, const void *codes2)
{
    __mmask64 first = _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(codes1), _mm512_set1_epi8(-128));
    __mmask64 second = _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(codes2), _mm512_set1_epi8(-1));
    return (first | second) != 0;
}

/* Store the upper halves of all words. */
static INLINE void uppers_store(uint16_t *target, words low, words high)
{
    const __m512i odd =
        _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                         25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    _mm512_storeu_si512(target, _mm512_permutex2var_epi16((__m512i)low, odd, (__m512i)high));
}

#include "compute/adam_8bit_body.h"
#include "compute/adam_bf16_body.h"

#endif
