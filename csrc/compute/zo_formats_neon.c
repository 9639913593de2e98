/* Formats with NEON, eight at a time. */
#if defined(__aarch64__)

#include <arm_neon.h>
#include <stdint.h>

#define LANES 8
#define WIDEN lh_zo_widen_neon
#define NARROW lh_zo_narrow_neon
#define CAST lh_zo_cast_neon

#include "compute/zo_formats.h"

/* In two registers. */
union two {
    floats all;
    float32x4_t each[2];
};

static INLINE floats half_widened(halves half)
{
    float16x8_t all = (float16x8_t)half;
    union two two = {.each = {vcvt_f32_f16(vget_low_f16(all)), vcvt_high_f32_f16(all)}};
    return two.all;
}

static INLINE halves half_cast(floats values)
{
    union two two = {.all = values};
    return (halves)vcvt_high_f16_f32(vcvt_f16_f32(two.each[0]), two.each[1]);
}

#endif
