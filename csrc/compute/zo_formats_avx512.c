/* Format conversions with AVX-512, sixteen elements at a time. */
#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>

#define LANES 16
#define WIDEN lh_zo_widen_avx512
#define NARROW lh_zo_narrow_avx512
#define CAST lh_zo_cast_avx512

#include "compute/zo_formats.h"

static INLINE floats half_widened(halves half)
{
    return _mm512_cvtph_ps((__m256i)half);
}

static INLINE halves half_cast(floats values)
{
    return (halves)_mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
}

static INLINE void f8_widen(float *values, const uint8_t *kept)
{
    const __m512i nan = _mm512_set1_epi16(NAN_F8);
    __m512i bits = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)kept));
    __m512i magnitude = _mm512_and_si512(bits, nan), half = _mm512_slli_epi16(magnitude, 7);
    __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, nan);
    half = _mm512_or_si512(half, _mm512_slli_epi16(_mm512_srli_epi16(bits, 7), 15));
    half = _mm512_mask_mov_epi16(half, is_nan, _mm512_or_si512(half, _mm512_set1_epi16(0x7E00)));
    for (int i = 0; i < 2; i++) {
        __m256i part = i == 0 ? _mm512_castsi512_si256(half) : _mm512_extracti64x4_epi64(half, 1);
        _mm512_storeu_ps(values + 16 * i, _mm512_cvtph_ps(part) * 256.0f);
    }
}

static INLINE void f8_narrow(uint8_t *kept, const float *values)
{
    floats low = (floats)_mm512_loadu_ps(values) * 0x1p-8f;
    floats high = (floats)_mm512_loadu_ps(values + 16) * 0x1p-8f;
    __m512i half = _mm512_castsi256_si512((__m256i)half_cast(low));
    half = _mm512_inserti64x4(half, (__m256i)half_cast(high), 1);
    __m512i magnitude = _mm512_srli_epi16(_mm512_slli_epi16(half, 1), 8);
    magnitude = _mm512_min_epu16(magnitude, _mm512_set1_epi16(NAN_F8));
    __m512i sign = _mm512_slli_epi16(_mm512_srli_epi16(half, 15), 7);
    __m256i bits = _mm512_cvtepi16_epi8(_mm512_or_si512(magnitude, sign));
    _mm256_storeu_si256((void *)kept, bits);
}

#endif
