/* The definition of the 8-bit format, and the conversions between formats. See adam_states.h. */
#include "compute/adam_states.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "compute/adam_8bit.h"

/* Samples of zo.h's streams; zeroth-order training uses others and has other seeds. */
#define SAMPLE_MOMENT1 65534
#define SAMPLE_MOMENT2 65533

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

void lh_adam_8bit_decode_ref(const struct lh_adam_moments *moments, float *moment1, float *moment2,
                             uint64_t count)
{
    const int8_t *codes1 = moments->moment1;
    const uint8_t *codes2 = moments->moment2;

    for (uint64_t i = 0; i < count; i++) {
        struct lh_adam_scales scales = moments->scales[i / LH_ADAM_STATES_BLOCK];
        uint32_t code1 = (uint32_t)abs(codes1[i]);
        float value1 = float_of((code1 << LH_ADAM_8BIT_CODE_SHIFT) + LH_ADAM_8BIT_ONE) - 1;
        float m = copysignf(value1 * lh_adam_8bit_unit1(scales.moment1), codes1[i]);
        float root = (float)codes2[i] * lh_adam_8bit_unit2(scales.moment2);

        moment1[i] = codes1[i] == LH_ADAM_8BIT_NAN1 ? float_of(LH_ADAM_NAN_BITS) : m;
        moment2[i] = codes2[i] == LH_ADAM_8BIT_NAN2 ? float_of(LH_ADAM_NAN_BITS) : root * root;
    }
}

/* The largest magnitude of a block, without NaNs. */
static float largest(const float *values)
{
    float most = 0;

    for (int i = 0; i < LH_ADAM_STATES_BLOCK; i++)
        if (fabsf(values[i]) > most)
            most = fabsf(values[i]);
    return most;
}

/* The code whose value is nearest to a number in [0, 247]. */
static int code_of(float value)
{
    const uint32_t half = UINT32_C(1) << (LH_ADAM_8BIT_CODE_SHIFT - 1);

    return (int)((bits_of(value + 1) - LH_ADAM_8BIT_ONE + half) >> LH_ADAM_8BIT_CODE_SHIFT);
}

static void block_encode(int8_t *codes1, uint8_t *codes2, struct lh_adam_scales *scales,
                         const float *moment1, const float *roots)
{
    float inverse1, inverse2;

    scales->moment1 = lh_adam_8bit_scale(bits_of(largest(moment1)));
    scales->moment2 = lh_adam_8bit_scale(bits_of(largest(roots)));
    inverse1 = lh_adam_8bit_inverse(scales->moment1);
    inverse2 = lh_adam_8bit_inverse(scales->moment2);
    for (int i = 0; i < LH_ADAM_STATES_BLOCK; i++) {
        float part1 = fminf(fabsf(moment1[i]) * inverse1, 1);
        float part2 = fminf(fabsf(roots[i]) * inverse2, 1);
        int code1 = code_of(part1 * LH_ADAM_8BIT_MAX1);
        int code2 = nearest(part2 * LH_ADAM_8BIT_MAX2);

        if (code2 == 0 && roots[i] != 0 && scales->moment2 != 0)
            code2 = 1;
        if (signbit(moment1[i]))
            code1 = -code1;
        codes1[i] = isnan(moment1[i]) ? LH_ADAM_8BIT_NAN1 : (int8_t)code1;
        codes2[i] = isnan(roots[i]) ? LH_ADAM_8BIT_NAN2 : (uint8_t)code2;
    }
}

void lh_adam_8bit_encode_ref(const struct lh_adam_moments *moments, const float *moment1,
                             const float *roots, uint64_t count)
{
    for (uint64_t i = 0; i < count; i += LH_ADAM_STATES_BLOCK)
        block_encode((int8_t *)moments->moment1 + i, (uint8_t *)moments->moment2 + i,
                     moments->scales + i / LH_ADAM_STATES_BLOCK, moment1 + i, roots + i);
}

const struct lh_adam_states_ops lh_adam_states_ref = {
    .zo = {"ref", lh_zo_ref, lh_zo_widen_ref, lh_zo_narrow_ref, lh_zo_cast_ref},
    .decode_8bit = lh_adam_8bit_decode_ref,
    .encode_8bit = lh_adam_8bit_encode_ref,
};

#if defined(__x86_64__)
const struct lh_adam_states_ops lh_adam_states_avx2 = {
    .zo = {"avx2", lh_zo_avx2, lh_zo_widen_avx2, lh_zo_narrow_avx2, lh_zo_cast_avx2},
    .decode_8bit = lh_adam_8bit_decode_avx2,
    .encode_8bit = lh_adam_8bit_encode_avx2,
};
const struct lh_adam_states_ops lh_adam_states_avx512 = {
    .zo = {"avx512", lh_zo_avx512, lh_zo_widen_avx512, lh_zo_narrow_avx512, lh_zo_cast_avx512},
    .decode_8bit = lh_adam_8bit_decode_avx512,
    .encode_8bit = lh_adam_8bit_encode_avx512,
};
#elif defined(__aarch64__)
const struct lh_adam_states_ops lh_adam_states_neon = {
    .zo = {"neon", lh_zo_neon, lh_zo_widen_neon, lh_zo_narrow_neon, lh_zo_cast_neon},
    .decode_8bit = lh_adam_8bit_decode_neon,
    .encode_8bit = lh_adam_8bit_encode_neon,
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
    ops->zo.widen(moment1, moments->moment1, LH_ZO_FORMAT_BF16, count);
    ops->zo.widen(moment2, moments->moment2, LH_ZO_FORMAT_BF16, count);
}

void lh_adam_states_root(enum lh_adam_states states, float *moment2, uint64_t count)
{
    for (uint64_t i = 0; states == LH_ADAM_STATES_8BIT && i < count; i++)
        moment2[i] = sqrtf(moment2[i]);
}

/* Round values stochastically and store them as bf16. */
static void bf16_store(const struct lh_zo_kernel *zo, uint16_t *target, float *values,
                       uint64_t first, uint64_t count, const struct lh_zo_stream *stream)
{
    const struct lh_zo_op round = {
        .kind = LH_ZO_OP_ROUND, .stream = *stream, .format = LH_ZO_FORMAT_BF16};

    lh_zo_apply_by(zo, values, values, first, count, &round, 1);
    zo->narrow(target, values, LH_ZO_FORMAT_BF16, count);
}

void lh_adam_states_encode(const struct lh_adam_states_ops *ops,
                           const struct lh_adam_moments *moments, float *moment1, float *moment2,
                           uint64_t first, uint64_t count, const struct lh_adam_random *random)
{
    struct lh_zo_stream stream = {random->seed, SAMPLE_MOMENT1, random->unit, random->step};

    LH_ASSERT(lh_is_aligned(first, LH_ADAM_STATES_BLOCK));
    LH_ASSERT(lh_is_aligned(count, LH_ADAM_STATES_BLOCK));
    LH_ASSERT(moments->states != LH_ADAM_STATES_F32);
    if (!ops)
        ops = best();
    if (moments->states == LH_ADAM_STATES_8BIT) {
        ops->encode_8bit(moments, moment1, moment2, count);
        return;
    }
    bf16_store(&ops->zo, moments->moment1, moment1, first, count, &stream);
    stream.sample = SAMPLE_MOMENT2;
    bf16_store(&ops->zo, moments->moment2, moment2, first, count, &stream);
}
