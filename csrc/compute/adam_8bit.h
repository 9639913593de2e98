/*
 * Private parts of adam_states.h: the arithmetic of scales, which all instruction sets share, and
 * the conversions of moments of each instruction set (rule_*.c).
 */
#ifndef LH_COMPUTE_ADAM_8BIT_H
#define LH_COMPUTE_ADAM_8BIT_H

#include <string.h>

#include "compute/adam_kernels.h"
#include "compute/adam_states.h"
#include "compute/zo_kernels.h"

#define LH_ADAM_8BIT_MAX1 247.0f /* the value of code 127 */
#define LH_ADAM_8BIT_MAX2 254.0f
#define LH_ADAM_8BIT_NAN1 (-128)
#define LH_ADAM_8BIT_NAN2 255
/* A code of the first moment is the bits of its value + 1 from here on, less those of 1. */
#define LH_ADAM_8BIT_CODE_SHIFT 19
#define LH_ADAM_8BIT_ONE UINT32_C(0x3F800000)
/* Adding 1.5 * 2^23 rounds to an integer, which is then in the sum's low bits. */
#define LH_ADAM_8BIT_ROUND 0x1.8p23f
#define LH_ADAM_8BIT_ROUND_BITS UINT32_C(0x4B400000)
/* The same of moments in 4 bits ([Note: Moments in 4 bits]). */
#define LH_ADAM_4BIT_MAX1 11.0f /* the value of code 7 */
#define LH_ADAM_4BIT_MAX2 16.0f
#define LH_ADAM_4BIT_NAN (-8)
#define LH_ADAM_4BIT_CODE_SHIFT 22
/* A scale is a float without its 13 low bits, relative to the bits of 2^-43. */
#define LH_ADAM_8BIT_SCALE_SHIFT 13
#define LH_ADAM_8BIT_SCALE_BITS UINT32_C(0x2A000000)
#define LH_ADAM_8BIT_SCALE_MAX UINT32_C(0xFFFF)

/* Round a number that is at least 0 and not NaN, given by its bits, to a scale. */
static inline uint16_t lh_adam_8bit_scale(uint32_t bits)
{
    const uint32_t half = UINT32_C(1) << (LH_ADAM_8BIT_SCALE_SHIFT - 1);
    uint32_t scale;

    if (bits < LH_ADAM_8BIT_SCALE_BITS)
        return 0;
    scale = (bits - LH_ADAM_8BIT_SCALE_BITS + half) >> LH_ADAM_8BIT_SCALE_SHIFT;
    return (uint16_t)(scale < LH_ADAM_8BIT_SCALE_MAX ? scale : LH_ADAM_8BIT_SCALE_MAX);
}

/* The value of a scale. */
static inline float lh_adam_8bit_value(uint16_t scale)
{
    uint32_t bits = ((uint32_t)scale << LH_ADAM_8BIT_SCALE_SHIFT) + LH_ADAM_8BIT_SCALE_BITS;
    float value;

    memcpy(&value, &bits, sizeof(value));
    return scale == 0 ? 0 : value;
}

/* 1 / scale, or 0. */
static inline float lh_adam_8bit_inverse(uint16_t scale)
{
    return scale == 0 ? 0 : 1 / lh_adam_8bit_value(scale);
}

/* What a code's value is multiplied by. */
static inline float lh_adam_8bit_unit1(uint16_t scale)
{
    return lh_adam_8bit_value(scale) * (1 / LH_ADAM_8BIT_MAX1);
}

/* The root of the second moment whose code is 1. */
static inline float lh_adam_8bit_unit2(uint16_t scale)
{
    return lh_adam_8bit_value(scale) * (1 / LH_ADAM_8BIT_MAX2);
}

/* The same of moments in 4 bits, whose second code stands for a number that is 1 larger. */
static inline float lh_adam_4bit_unit1(uint16_t scale)
{
    return lh_adam_8bit_value(scale) * (1 / LH_ADAM_4BIT_MAX1);
}

static inline float lh_adam_4bit_unit2(uint16_t scale)
{
    return lh_adam_8bit_value(scale) * (1 / LH_ADAM_4BIT_MAX2);
}

/* The conversions of one instruction set. count is a multiple of LH_ADAM_STATES_BLOCK. */
struct lh_adam_states_ops {
    struct lh_zo_kernel zo; /* makes random words and decodes bf16 */
    /* Round to bf16 with a random word for each element. */
    void (*round_bf16)(const struct lh_adam_moments *moments, const float *moment1,
                       const float *moment2, const uint32_t *random, uint64_t count);
    void (*decode_8bit)(const struct lh_adam_moments *moments, float *moment1, float *moment2,
                        uint64_t count);
    void (*encode_8bit)(const struct lh_adam_moments *moments, const float *moment1,
                        const float *roots, uint64_t count);
    void (*decode_4bit)(const struct lh_adam_moments *moments, float *moment1, float *moment2,
                        uint64_t count);
    void (*encode_4bit)(const struct lh_adam_moments *moments, const float *moment1,
                        const float *roots, uint64_t count);
};

/* The definition, which runs on any machine. */
void lh_adam_round_bf16_ref(const struct lh_adam_moments *moments, const float *moment1,
                            const float *moment2, const uint32_t *random, uint64_t count);
void lh_adam_8bit_decode_ref(const struct lh_adam_moments *moments, float *moment1, float *moment2,
                             uint64_t count);
void lh_adam_8bit_encode_ref(const struct lh_adam_moments *moments, const float *moment1,
                             const float *roots, uint64_t count);
void lh_adam_4bit_decode_ref(const struct lh_adam_moments *moments, float *moment1, float *moment2,
                             uint64_t count);
void lh_adam_4bit_encode_ref(const struct lh_adam_moments *moments, const float *moment1,
                             const float *roots, uint64_t count);

#if defined(__x86_64__)
/* Needs AVX2. */
void lh_adam_round_bf16_avx2(const struct lh_adam_moments *moments, const float *moment1,
                             const float *moment2, const uint32_t *random, uint64_t count);
void lh_adam_8bit_decode_avx2(const struct lh_adam_moments *moments, float *moment1, float *moment2,
                              uint64_t count);
void lh_adam_8bit_encode_avx2(const struct lh_adam_moments *moments, const float *moment1,
                              const float *roots, uint64_t count);
void lh_adam_4bit_decode_avx2(const struct lh_adam_moments *moments, float *moment1, float *moment2,
                              uint64_t count);
void lh_adam_4bit_encode_avx2(const struct lh_adam_moments *moments, const float *moment1,
                              const float *roots, uint64_t count);
/* Needs AVX-512 F, BW and DQ. */
void lh_adam_round_bf16_avx512(const struct lh_adam_moments *moments, const float *moment1,
                               const float *moment2, const uint32_t *random, uint64_t count);
void lh_adam_8bit_decode_avx512(const struct lh_adam_moments *moments, float *moment1,
                                float *moment2, uint64_t count);
void lh_adam_8bit_encode_avx512(const struct lh_adam_moments *moments, const float *moment1,
                                const float *roots, uint64_t count);
void lh_adam_4bit_decode_avx512(const struct lh_adam_moments *moments, float *moment1,
                                float *moment2, uint64_t count);
void lh_adam_4bit_encode_avx512(const struct lh_adam_moments *moments, const float *moment1,
                                const float *roots, uint64_t count);
#elif defined(__aarch64__)
/* Runs on every ARMv8-A. */
void lh_adam_round_bf16_neon(const struct lh_adam_moments *moments, const float *moment1,
                             const float *moment2, const uint32_t *random, uint64_t count);
void lh_adam_8bit_decode_neon(const struct lh_adam_moments *moments, float *moment1, float *moment2,
                              uint64_t count);
void lh_adam_8bit_encode_neon(const struct lh_adam_moments *moments, const float *moment1,
                              const float *roots, uint64_t count);
void lh_adam_4bit_decode_neon(const struct lh_adam_moments *moments, float *moment1, float *moment2,
                              uint64_t count);
void lh_adam_4bit_encode_neon(const struct lh_adam_moments *moments, const float *moment1,
                              const float *roots, uint64_t count);
#endif

#endif
