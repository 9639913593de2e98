/* Moments in 8 bits and in bf16 with NEON, four elements at a time. */
#if defined(__aarch64__)

#include <arm_neon.h>
#include <stdbool.h>
#include <string.h>

#define VECTOR_BYTES 16
#define REGISTER "+w"
#define DECODE lh_adam_8bit_decode_neon
#define ENCODE lh_adam_8bit_encode_neon
#define ROUND_BF16 lh_adam_round_bf16_neon
#define DECODE_REF lh_adam_8bit_decode_ref
#define ENCODE_REF lh_adam_8bit_encode_ref

#include "compute/zo_vectors.h"

static INLINE words lesser(words a, words b)
{
    return (words)vminq_s32((int32x4_t)a, (int32x4_t)b);
}

static INLINE words greater(words a, words b)
{
    return (words)vmaxq_s32((int32x4_t)a, (int32x4_t)b);
}

static INLINE uint32_t largest_of(words a)
{
    return vmaxvq_u32((uint32x4_t)a);
}

static INLINE uint8x8_t bytes_load(const void *source)
{
    uint32_t word;
    memcpy(&word, source, sizeof(word));
    return vreinterpret_u8_u32(vdup_n_u32(word));
}

static INLINE words signed_load(const int8_t *source)
{
    int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(bytes_load(source)));
    return (words)vmovl_s16(vget_low_s16(wide));
}

static INLINE floats unsigned_load(const uint8_t *source)
{
    uint16x8_t wide = vmovl_u8(bytes_load(source));
    return (floats)vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
}

static INLINE void bytes_store(uint8_t *target, words codes)
{
    uint16x4_t narrow = vmovn_u32((uint32x4_t)codes);
    uint8x8_t bytes = vmovn_u16(vcombine_u16(narrow, narrow));
    uint32_t word = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
    memcpy(target, &word, sizeof(word));
}

static INLINE bool has_nan_code(const void *codes1, const void *codes2)
{
    const uint8_t *first = codes1, *second = codes2;
    uint8x16_t found = vdupq_n_u8(0);
    for (int i = 0; i < 64; i += 16) {
        found = vorrq_u8(found, vceqq_u8(vld1q_u8(first + i), vdupq_n_u8(0x80)));
        found = vorrq_u8(found, vceqq_u8(vld1q_u8(second + i), vdupq_n_u8(0xFF)));
    }
    return vmaxvq_u8(found) != 0;
}

/* Store the upper halves of all words. */
static INLINE void uppers_store(uint16_t *target, words low, words high)
{
    vst1q_u16(target, vuzp2q_u16((uint16x8_t)low, (uint16x8_t)high));
}

#include "compute/adam_8bit_body.h"
#include "compute/adam_bf16_body.h"

#endif
