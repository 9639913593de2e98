/* Decode grains of signed bytes with AVX-512, 32 elements at a time: see unpack_grains_body.h. */
#if defined(__x86_64__)

#include <string.h>

#include "compute/unpack_avx2.h"

static inline float half_value(uint16_t half)
{
    return _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_set1_epi16((int16_t)half)));
}

/* Round to bf16, in the high half of each lane; the values are not NaNs. */
static inline __m512i high_rounded(__m512 value)
{
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
}

/* Store 32 signed bytes times a scale for each 16. */
static inline __attribute__((always_inline)) void
scaled_put(__m256i bytes, float first, float second, uint32_t dtype, void *out, uint64_t at)
{
    const __m512i odd_words =
        _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                         25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    low = _mm512_mul_ps(low, _mm512_set1_ps(first));
    high = _mm512_mul_ps(high, _mm512_set1_ps(second));
    if (dtype == LH_DTYPE_F32) {
        _mm512_storeu_ps((float *)out + at, low);
        _mm512_storeu_ps((float *)out + at + 16, high);
        return;
    }
    __m512i narrow;
    if (dtype == LH_DTYPE_F16)
        narrow = _mm512_inserti64x4(
            _mm512_castsi256_si512(_mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT)),
            _mm512_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT), 1);
    else
        narrow = _mm512_permutex2var_epi16(high_rounded(low), odd_words, high_rounded(high));
    _mm512_storeu_si512((uint16_t *)out + at, narrow);
}

#include "compute/unpack_grains_body.h"

static inline
    __attribute__((always_inline)) uint64_t bytes_unpack(const struct lh_unpack *unpack,
                                                         const uint8_t *packed, uint64_t count,
                                                         void *out, uint32_t dtype)
{
    return unpack->format == LH_UNPACK_FORMAT_Q8_0 ? q8_0_unpack(packed, count, out, dtype)
                                                   : q6_k_unpack(packed, count, out, dtype);
}

uint64_t lh_unpack_grains_avx512(const struct lh_unpack *unpack, const uint8_t *packed,
                                 uint64_t count, void *out)
{
    if (unpack->format != LH_UNPACK_FORMAT_Q8_0 && unpack->format != LH_UNPACK_FORMAT_Q6_K)
        return lh_unpack_grains_avx2(unpack, packed, count, out);
    if (unpack->dtype == LH_DTYPE_BF16)
        return bytes_unpack(unpack, packed, count, out, LH_DTYPE_BF16);
    return bytes_unpack(unpack, packed, count, out, unpack->dtype);
}

#endif
