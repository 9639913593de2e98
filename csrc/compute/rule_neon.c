/*
 * Every rule with NEON, and the formats of moments, four elements at a time. What is read goes
 * through the crc32 instruction, as in rule_avx2.c.
 */
#if defined(__aarch64__)

#include <arm_acle.h>
#include <arm_neon.h>
#include <string.h>

#define VECTOR_BYTES 16
#define TABLE(kind) lh_rule_neon##kind
#define DECODE lh_adam_8bit_decode_neon
#define ENCODE lh_adam_8bit_encode_neon
#define DECODE_4BIT lh_adam_4bit_decode_neon
#define ENCODE_4BIT lh_adam_4bit_encode_neon
#define ROUND_BF16 lh_adam_round_bf16_neon

#include "base/crc32c.h"
#include "compute/adam_kernels.h"
#include "compute/zo_vectors.h"

typedef floats values;
typedef words flags; /* all bits of a lane are set, or none */

static INLINE values splat(float a)
{
    return (values)vdupq_n_f32(a);
}

static INLINE values fma_of(values a, values b, values c)
{
    return (values)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

static INLINE values root_of(values a)
{
    return (values)vsqrtq_f32((float32x4_t)a);
}

static INLINE values sign_of(values a)
{
    words above = (words)(a > 0), below = (words)(a < 0);
    words one = (words)splat(1), minus = (words)splat(-1);

    return (values)((above & one) | (below & minus));
}

static INLINE flags equal_of(words a, words b)
{
    return (flags)(a == b);
}

static INLINE flags nan_of(values a)
{
    return (flags)(a != a);
}

static INLINE values nan_where(values a, flags where)
{
    return (values)vbslq_u32((uint32x4_t)where, vdupq_n_u32(LH_ADAM_NAN_BITS), (uint32x4_t)a);
}

static INLINE bool any_of(flags a)
{
    return vmaxvq_u32((uint32x4_t)a) != 0;
}

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

static INLINE values unsigned_load(const uint8_t *source)
{
    uint16x8_t wide = vmovl_u8(bytes_load(source));

    return (values)vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
}

static INLINE void bytes_store(uint8_t *target, words codes)
{
    uint16x4_t narrow = vmovn_u32((uint32x4_t)codes);
    uint8x8_t bytes = vmovn_u16(vcombine_u16(narrow, narrow));
    uint32_t word = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);

    memcpy(target, &word, sizeof(word));
}

static INLINE words shorts_load(const int16_t *source)
{
    return (words)vmovl_s16(vld1_s16(source));
}

static INLINE words uppers_load(const uint16_t *source)
{
    return (words)vshll_n_u16(vld1_u16(source), 16);
}

static INLINE values halves_load(const uint16_t *source)
{
    return (values)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(source)));
}

static INLINE words halves_of(values low, values high)
{
    return (words)vcombine_f16(vcvt_f16_f32((float32x4_t)low), vcvt_f16_f32((float32x4_t)high));
}

static INLINE words lowers_of(words low, words high)
{
    return (words)vuzp1q_u16((uint16x8_t)low, (uint16x8_t)high);
}

static INLINE words uppers_of(words low, words high)
{
    return (words)vuzp2q_u16((uint16x8_t)low, (uint16x8_t)high);
}

/* x^160 and x^96 modulo the CRC-32C polynomial: as in rule_avx512.c, but advancing 128 bits. */
#define FOLD_LOW UINT64_C(0xF20C0DFE)
#define FOLD_HIGH UINT64_C(0x493C7D27)
#define READS_ARE_FOLDED(folding) false

struct sum {
    words state;
};

static INLINE void fold(struct sum *sum, words added, const enum lh_adam_folding folding)
{
    const poly64x2_t constants = vcombine_p64(vcreate_p64(FOLD_LOW), vcreate_p64(FOLD_HIGH));
    poly64x2_t halves = (poly64x2_t)sum->state;
    poly128_t low = vmull_p64(vgetq_lane_p64(halves, 0), vgetq_lane_p64(constants, 0));
    poly128_t high = vmull_high_p64(halves, constants);

    (void)folding; /* there is only one form */
    sum->state = (words)vreinterpretq_u32_p128(low) ^ (words)vreinterpretq_u32_p128(high) ^ added;
}

static INLINE uint64_t word_crc(uint64_t crc, uint64_t word)
{
    return __crc32cd((uint32_t)crc, word);
}

static uint32_t sum_crc(const struct sum *sum, const enum lh_adam_folding folding)
{
    (void)folding;
    return lh_crc32c(UINT32_MAX, &sum->state, sizeof(sum->state));
}

#include "compute/moments_body.h"
#include "compute/rule_body.h"

#endif
