/* Format conversions with NEON, eight elements at a time. */
#if defined(__aarch64__)

#include <arm_neon.h>
#include <stdint.h>

#define LANES 8
#define WIDEN lh_zo_widen_neon
#define NARROW lh_zo_narrow_neon
#define CAST lh_zo_cast_neon

#include "compute/zo_formats.h"

/* A vector of LANES floats, which takes two registers. */
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

static INLINE void f8_widen(float *values, const uint8_t *kept)
{
    const uint16x8_t nan = vdupq_n_u16(NAN_F8);
    uint8x16_t all = vld1q_u8(kept);
    for (int i = 0; i < 2; i++) {
        uint16x8_t bits = vmovl_u8(i == 0 ? vget_low_u8(all) : vget_high_u8(all));
        uint16x8_t magnitude = vandq_u16(bits, nan), is_nan = vceqq_u16(magnitude, nan);
        uint16x8_t half = vshlq_n_u16(magnitude, 7);
        half = vorrq_u16(half, vshlq_n_u16(vshrq_n_u16(bits, 7), 15));
        half = vorrq_u16(half, vandq_u16(is_nan, vdupq_n_u16(0x7E00)));
        floats wide = half_widened((halves)half) * 256.0f;
        memcpy(values + 8 * i, &wide, sizeof(wide));
    }
}

static INLINE void f8_narrow(uint8_t *kept, const float *values)
{
    uint8x8_t made[2];
    for (int i = 0; i < 2; i++) {
        floats wide;
        memcpy(&wide, values + 8 * i, sizeof(wide));
        uint16x8_t half = (uint16x8_t)half_cast(wide * 0x1p-8f);
        uint16x8_t magnitude = vshrq_n_u16(vshlq_n_u16(half, 1), 8);
        magnitude = vminq_u16(magnitude, vdupq_n_u16(NAN_F8));
        made[i] = vmovn_u16(vorrq_u16(magnitude, vshlq_n_u16(vshrq_n_u16(half, 15), 7)));
    }
    vst1q_u8(kept, vcombine_u8(made[0], made[1]));
}

#endif
