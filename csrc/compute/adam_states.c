/* The definition of the formats, and the conversions between them. See adam_states.h. */
#include "compute/adam_states.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "compute/adam_8bit.h"

/* A sample of zo.h's streams; zeroth-order training uses others and has other seeds. */
#define SAMPLE_MOMENTS 65534
/* Elements whose random words are made at a time. */
#define WORDS_ELEMENTS 256

static uint32_t bits_of(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static float float_of(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* The nearest integer of a number in [0, 2^22), ties to even. */
static int nearest(float value)
{
    return (int)(bits_of(value + LH_ADAM_8BIT_ROUND) - LH_ADAM_8BIT_ROUND_BITS);
}

static float value1_of(int8_t code, uint16_t scale)
{
    uint32_t magnitude = (uint32_t)abs(code);
    float value = float_of((magnitude << LH_ADAM_8BIT_CODE_SHIFT) + LH_ADAM_8BIT_ONE) - 1;

    if (code == LH_ADAM_8BIT_NAN1)
        return float_of(LH_ADAM_NAN_BITS);
    return copysignf(value * lh_adam_8bit_unit1(scale), code);
}

static float value2_of(uint8_t code, uint16_t scale)
{
    float root = (float)code * lh_adam_8bit_unit2(scale);

    return code == LH_ADAM_8BIT_NAN2 ? float_of(LH_ADAM_NAN_BITS) : root * root;
}

void lh_adam_8bit_decode_ref(const struct lh_adam_moments *moments, float *moment1, float *moment2,
                             uint64_t count)
{
    const int8_t *codes1 = moments->moment1;
    const uint8_t *codes2 = moments->moment2;

    for (uint64_t i = 0; i < count; i++) {
        struct lh_adam_scales scales = moments->scales[i / LH_ADAM_STATES_BLOCK];

        if (moment1)
            moment1[i] = value1_of(codes1[i], scales.moment1);
        if (moment2)
            moment2[i] = value2_of(codes2[i], scales.moment2);
    }
}

/* The largest magnitude of a block, without NaNs; 0 if the block is NULL. */
static float largest(const float *values)
{
    float most = 0;

    for (int i = 0; values && i < LH_ADAM_STATES_BLOCK; i++)
        if (fabsf(values[i]) > most)
            most = fabsf(values[i]);
    return most;
}

/* The code whose value is nearest to a number that is at least 0. */
static int code_of(float value, int shift)
{
    const uint32_t half = UINT32_C(1) << (shift - 1);

    return (int)((bits_of(value + 1) - LH_ADAM_8BIT_ONE + half) >> shift);
}

static int8_t code1_of(float value, float inverse)
{
    float part = fminf(fabsf(value) * inverse, 1);
    int code = code_of(part * LH_ADAM_8BIT_MAX1, LH_ADAM_8BIT_CODE_SHIFT);

    return isnan(value) ? LH_ADAM_8BIT_NAN1 : (int8_t)(signbit(value) ? -code : code);
}

static uint8_t code2_of(float root, float inverse)
{
    float part = fminf(fabsf(root) * inverse, 1);
    int code = nearest(part * LH_ADAM_8BIT_MAX2);

    if (code == 0 && root != 0 && inverse != 0)
        code = 1;
    return isnan(root) ? LH_ADAM_8BIT_NAN2 : (uint8_t)code;
}

void lh_adam_8bit_encode_ref(const struct lh_adam_moments *moments, const float *moment1,
                             const float *roots, uint64_t count)
{
    for (uint64_t first = 0; first < count; first += LH_ADAM_STATES_BLOCK) {
        const struct lh_adam_moments block = lh_adam_moments_from(moments, first);
        const float *block1 = moment1 ? moment1 + first : NULL;
        const float *block2 = roots ? roots + first : NULL;
        int8_t *codes1 = block.moment1;
        uint8_t *codes2 = block.moment2;

        LH_ASSERT(block.scales && (!block1 || codes1) && (!block2 || codes2));
        block.scales->moment1 = lh_adam_8bit_scale(bits_of(largest(block1)));
        block.scales->moment2 = lh_adam_8bit_scale(bits_of(largest(block2)));
        for (int i = 0; block1 && i < LH_ADAM_STATES_BLOCK; i++)
            codes1[i] = code1_of(block1[i], lh_adam_8bit_inverse(block.scales->moment1));
        for (int i = 0; block2 && i < LH_ADAM_STATES_BLOCK; i++)
            codes2[i] = code2_of(block2[i], lh_adam_8bit_inverse(block.scales->moment2));
    }
}

/* The moments of a byte of two codes. */
static void moments_of(uint8_t byte, struct lh_adam_scales scales, float *m_out, float *v_out)
{
    int code = (byte & 0xF) - 2 * (byte & 0x8);
    float value = float_of(((uint32_t)abs(code) << LH_ADAM_4BIT_CODE_SHIFT) + LH_ADAM_8BIT_ONE) - 1;
    float root = (float)((byte >> 4) + 1) * lh_adam_4bit_unit2(scales.moment2);

    *m_out = code == LH_ADAM_4BIT_NAN
                 ? float_of(LH_ADAM_NAN_BITS)
                 : copysignf(value * lh_adam_4bit_unit1(scales.moment1), (float)code);
    *v_out = root * root;
}

void lh_adam_4bit_decode_ref(const struct lh_adam_moments *moments, float *moment1, float *moment2,
                             uint64_t count)
{
    const uint8_t *codes = moments->moment1;

    for (uint64_t i = 0; i < count; i++)
        moments_of(codes[i], moments->scales[i / LH_ADAM_STATES_BLOCK], moment1 + i, moment2 + i);
}

/* The byte of the codes of two moments. */
static uint8_t byte_of(float value, float root, float inverse1, float inverse2)
{
    float part1 = fminf(fabsf(value) * inverse1, 1), part2 = fminf(fabsf(root) * inverse2, 1);
    int code1 = code_of(part1 * LH_ADAM_4BIT_MAX1, LH_ADAM_4BIT_CODE_SHIFT);
    int code2 = isnan(root) ? 0 : nearest(fmaxf(part2 * LH_ADAM_4BIT_MAX2, 1)) - 1;

    code1 = isnan(value) ? LH_ADAM_4BIT_NAN : signbit(value) ? -code1 : code1;
    return (uint8_t)((code1 & 0xF) | code2 << 4);
}

void lh_adam_4bit_encode_ref(const struct lh_adam_moments *moments, const float *moment1,
                             const float *roots, uint64_t count)
{
    for (uint64_t first = 0; first < count; first += LH_ADAM_STATES_BLOCK) {
        const struct lh_adam_moments block = lh_adam_moments_from(moments, first);
        uint8_t *codes = block.moment1;

        LH_ASSERT(block.scales && codes && moment1 && roots);
        block.scales->moment1 = lh_adam_8bit_scale(bits_of(largest(moment1 + first)));
        block.scales->moment2 = lh_adam_8bit_scale(bits_of(largest(roots + first)));
        for (int i = 0; i < LH_ADAM_STATES_BLOCK; i++)
            codes[i] = byte_of(moment1[first + i], roots[first + i],
                               lh_adam_8bit_inverse(block.scales->moment1),
                               lh_adam_8bit_inverse(block.scales->moment2));
    }
}

/* Round a float to bf16, with the upper half of a random word. */
static uint16_t bf16_of(float value, uint32_t random)
{
    return (uint16_t)(lh_zo_rounded(bits_of(value), random, LH_ZO_FORMAT_BF16) >> 16);
}

void lh_adam_round_bf16_ref(const struct lh_adam_moments *moments, const float *moment1,
                            const float *moment2, const uint32_t *random, uint64_t count)
{
    uint16_t *target1 = moments->moment1, *target2 = moments->moment2;

    for (uint64_t i = 0; i < count; i++) {
        if (moment1)
            target1[i] = bf16_of(moment1[i], random[i]);
        if (moment2)
            target2[i] = bf16_of(moment2[i], random[i] << 16);
    }
}

const struct lh_adam_states_ops lh_adam_states_ref = {
    .zo = {"ref", lh_zo_ref, lh_zo_words_ref, lh_zo_widen_ref, lh_zo_narrow_ref, lh_zo_cast_ref},
    .round_bf16 = lh_adam_round_bf16_ref,
    .decode_8bit = lh_adam_8bit_decode_ref,
    .encode_8bit = lh_adam_8bit_encode_ref,
    .decode_4bit = lh_adam_4bit_decode_ref,
    .encode_4bit = lh_adam_4bit_encode_ref,
};

#if defined(__x86_64__)
const struct lh_adam_states_ops lh_adam_states_avx2 = {
    .zo = {"avx2", lh_zo_avx2, lh_zo_words_avx2, lh_zo_widen_avx2, lh_zo_narrow_avx2,
           lh_zo_cast_avx2},
    .round_bf16 = lh_adam_round_bf16_avx2,
    .decode_8bit = lh_adam_8bit_decode_avx2,
    .encode_8bit = lh_adam_8bit_encode_avx2,
    .decode_4bit = lh_adam_4bit_decode_avx2,
    .encode_4bit = lh_adam_4bit_encode_avx2,
};
const struct lh_adam_states_ops lh_adam_states_avx512 = {
    .zo = {"avx512", lh_zo_avx512, lh_zo_words_avx512, lh_zo_widen_avx512, lh_zo_narrow_avx512,
           lh_zo_cast_avx512},
    .round_bf16 = lh_adam_round_bf16_avx512,
    .decode_8bit = lh_adam_8bit_decode_avx512,
    .encode_8bit = lh_adam_8bit_encode_avx512,
    .decode_4bit = lh_adam_4bit_decode_avx512,
    .encode_4bit = lh_adam_4bit_encode_avx512,
};
#elif defined(__aarch64__)
const struct lh_adam_states_ops lh_adam_states_neon = {
    .zo = {"neon", lh_zo_neon, lh_zo_words_neon, lh_zo_widen_neon, lh_zo_narrow_neon,
           lh_zo_cast_neon},
    .round_bf16 = lh_adam_round_bf16_neon,
    .decode_8bit = lh_adam_8bit_decode_neon,
    .encode_8bit = lh_adam_8bit_encode_neon,
    .decode_4bit = lh_adam_4bit_decode_neon,
    .encode_4bit = lh_adam_4bit_encode_neon,
};
#endif

static const struct lh_adam_states_ops *best(void)
{
    const struct lh_adam_kernel *kernels;

    lh_adam_kernels(&kernels);
    return kernels->states;
}

void lh_adam_states_decode(const struct lh_adam_states_ops *ops,
                           const struct lh_adam_moments *moments, float *moment1, float *moment2,
                           uint64_t count)
{
    LH_ASSERT(lh_is_aligned(count, LH_ADAM_STATES_BLOCK));
    LH_ASSERT(moments->states != LH_ADAM_STATES_F32);
    if (!ops)
        ops = best();
    if (moments->states == LH_ADAM_STATES_8BIT) {
        ops->decode_8bit(moments, moment1, moment2, count);
        return;
    }
    if (moments->states == LH_ADAM_STATES_4BIT) {
        ops->decode_4bit(moments, moment1, moment2, count);
        return;
    }
    if (moment1)
        ops->zo.widen(moment1, moments->moment1, LH_ZO_FORMAT_BF16, count);
    if (moment2)
        ops->zo.widen(moment2, moments->moment2, LH_ZO_FORMAT_BF16, count);
}

void lh_adam_states_root(enum lh_adam_states states, float *moment2, uint64_t count)
{
    for (uint64_t i = 0; lh_adam_has_scales(states) && i < count; i++)
        moment2[i] = sqrtf(moment2[i]);
}

void lh_adam_states_words(const struct lh_adam_states_ops *ops, uint32_t *words, uint64_t first,
                          uint64_t count, const struct lh_adam_random *random)
{
    const struct lh_zo_stream stream = {random->seed, SAMPLE_MOMENTS, random->param, random->step};

    ops->zo.words(words, first, count, &stream);
}

void lh_adam_states_encode(const struct lh_adam_states_ops *ops,
                           const struct lh_adam_moments *moments, float *moment1, float *moment2,
                           uint64_t first, uint64_t count, const struct lh_adam_random *random)
{
    uint32_t words[WORDS_ELEMENTS] __attribute__((aligned(64)));

    LH_ASSERT(lh_is_aligned(first, LH_ADAM_STATES_BLOCK));
    LH_ASSERT(lh_is_aligned(count, LH_ADAM_STATES_BLOCK));
    LH_ASSERT(moments->states != LH_ADAM_STATES_F32);
    if (!ops)
        ops = best();
    if (moments->states == LH_ADAM_STATES_8BIT) {
        ops->encode_8bit(moments, moment1, moment2, count);
        return;
    }
    if (moments->states == LH_ADAM_STATES_4BIT) {
        ops->encode_4bit(moments, moment1, moment2, count);
        return;
    }
    for (uint64_t at = 0; at < count; at += WORDS_ELEMENTS) {
        const struct lh_adam_moments part = lh_adam_moments_from(moments, at);
        uint64_t part_count = lh_min_u64(count - at, WORDS_ELEMENTS);

        lh_adam_states_words(ops, words, first + at, part_count, random);
        ops->round_bf16(&part, moment1 ? moment1 + at : NULL, moment2 ? moment2 + at : NULL, words,
                        part_count);
    }
}
