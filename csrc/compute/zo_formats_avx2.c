/* Formats with AVX2 and F16C, eight at a time. */
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

#endif
