/* Format conversions with AVX2 and F16C, eight elements at a time. */
#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>

#define LANES 8
#define WIDEN lh_zo_widen_avx2
#define NARROW lh_zo_narrow_avx2
#define CAST lh_zo_cast_avx2

#include "compute/zo_formats.h"

static INLINE floats half_widened(halves half)
{
    return _mm256_cvtph_ps((__m128i)half);
}

static INLINE halves half_cast(floats values)
{
    return (halves)_mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
}

static INLINE void f8_widen(float *values, const uint8_t *kept)
{
    const __m256i nan = _mm256_set1_epi16(NAN_F8);
    __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)kept));
    __m256i magnitude = _mm256_and_si256(bits, nan), half = _mm256_slli_epi16(magnitude, 7);
    __m256i is_nan = _mm256_cmpeq_epi16(magnitude, nan);
    half = _mm256_or_si256(half, _mm256_slli_epi16(_mm256_srli_epi16(bits, 7), 15));
    half = _mm256_or_si256(half, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7E00)));
    for (int i = 0; i < 2; i++) {
        __m128i part = i == 0 ? _mm256_castsi256_si128(half) : _mm256_extracti128_si256(half, 1);
        _mm256_storeu_ps(values + 8 * i, _mm256_cvtph_ps(part) * 256.0f);
    }
}

static INLINE void f8_narrow(uint8_t *kept, const float *values)
{
    floats low = (floats)_mm256_loadu_ps(values) * 0x1p-8f;
    floats high = (floats)_mm256_loadu_ps(values + 8) * 0x1p-8f;
    __m256i half = _mm256_castsi128_si256((__m128i)half_cast(low));
    half = _mm256_inserti128_si256(half, (__m128i)half_cast(high), 1);
    __m256i magnitude = _mm256_srli_epi16(_mm256_slli_epi16(half, 1), 8);
    magnitude = _mm256_min_epu16(magnitude, _mm256_set1_epi16(NAN_F8));
    __m256i sign = _mm256_slli_epi16(_mm256_srli_epi16(half, 15), 7);
    __m256i bits = _mm256_or_si256(magnitude, sign);
    bits = _mm256_permute4x64_epi64(_mm256_packus_epi16(bits, bits), 0x08);
    _mm_storeu_si128((void *)kept, _mm256_castsi256_si128(bits));
}

#endif
