/* Recognize casts with NEON, as in cast_avx2.c. */
#if defined(__aarch64__)

#include <arm_neon.h>

#include "compute/cast_kernels.h"

static inline uint16x4_t bf16_rounded(float32x4_t value)
{
    uint32x4_t bits = vreinterpretq_u32_f32(value);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t nearest = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);

    return vshrn_n_u32(vbslq_u32(vceqq_f32(value, value), nearest, vdupq_n_u32(0x7FC00000)), 16);
}

static inline uint16x4_t half_rounded(float32x4_t value)
{
    uint32x4_t bits = vreinterpretq_u32_f32(value);
    uint32x4_t settled = vbslq_u32(vdupq_n_u32(0x7FFFFFFF), vdupq_n_u32(0x7FC00000), bits);

    bits = vbslq_u32(vceqq_f32(value, value), bits, settled);
    return vreinterpret_u16_f16(vcvt_f16_f32(vreinterpretq_f32_u32(bits)));
}

static inline __attribute__((always_inline)) bool
batch_differs(const uint16_t *cast, const float *values, uint16x4_t (*round)(float32x4_t value))
{
    uint16x4_t difference = vdup_n_u16(0);

    for (int i = 0; i < LH_CAST_BATCH; i += 4) {
        float32x4_t value = vreinterpretq_f32_u8(vld1q_u8((const uint8_t *)(values + i)));
        uint16x4_t actual = vreinterpret_u16_u8(vld1_u8((const uint8_t *)(cast + i)));

        difference = vorr_u16(difference, veor_u16(actual, round(value)));
    }
    return vmaxv_u16(difference) != 0;
}

bool lh_cast_bf16_differs_neon(const uint16_t *cast, const float *values)
{
    return batch_differs(cast, values, bf16_rounded);
}

bool lh_cast_half_differs_neon(const uint16_t *cast, const float *values)
{
    return batch_differs(cast, values, half_rounded);
}

#endif
