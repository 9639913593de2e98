/* Recognize casts with AVX2 and F16C, eight elements at a time, one per 32-bit lane. */
#if defined(__x86_64__)

#include <immintrin.h>

#include "compute/cast_kernels.h"

static inline __m256i bf16_rounded(__m256 value)
{
    __m256i bits = _mm256_castps_si256(value);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));

    return _mm256_blendv_epi8(_mm256_srli_epi32(nearest, 16), _mm256_set1_epi32(0x7FC0), is_nan);
}

/* The instruction preserves a NaN's payload, but the result may keep only the NaN's sign. */
static inline __m256i half_rounded(__m256 value)
{
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
    __m256 settled = _mm256_or_ps(_mm256_and_ps(value, _mm256_set1_ps(-0.0f)), nan);

    value = _mm256_blendv_ps(value, settled, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

static inline __attribute__((always_inline)) bool
batch_differs(const uint16_t *cast, const float *values, __m256i (*round)(__m256 value))
{
    __m256i difference = _mm256_setzero_si256();

    for (int i = 0; i < LH_CAST_BATCH; i += 8) {
        __m256i actual = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(cast + i)));
        __m256i expected = round(_mm256_loadu_ps(values + i));

        difference = _mm256_or_si256(difference, _mm256_xor_si256(actual, expected));
    }
    return !_mm256_testz_si256(difference, difference);
}

bool lh_cast_bf16_differs_avx2(const uint16_t *cast, const float *values)
{
    return batch_differs(cast, values, bf16_rounded);
}

bool lh_cast_half_differs_avx2(const uint16_t *cast, const float *values)
{
    return batch_differs(cast, values, half_rounded);
}

#endif
