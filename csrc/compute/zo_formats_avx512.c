/* Formats with AVX-512, sixteen at a time. */
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

#endif
