/* The definition of z, one counter at a time. */
#include <math.h>
#include <string.h>

#include "compute/zo_kernels.h"

void lh_zo_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words_out[4])
{
    uint32_t words[4] = {counter[0], counter[1], counter[2], counter[3]};
    uint32_t keys[2] = {key[0], key[1]};
    for (int i = 0; i < LH_ZO_ROUND_COUNT; i++) {
        uint64_t product0 = (uint64_t)words[0] * LH_ZO_MULTIPLIER_0;
        uint64_t product1 = (uint64_t)words[2] * LH_ZO_MULTIPLIER_1;
        words[0] = (uint32_t)(product1 >> 32) ^ words[1] ^ keys[0];
        words[1] = (uint32_t)product1;
        words[2] = (uint32_t)(product0 >> 32) ^ words[3] ^ keys[1];
        words[3] = (uint32_t)product0;
        keys[0] += LH_ZO_WEYL_0;
        keys[1] += LH_ZO_WEYL_1;
    }
    memcpy(words_out, words, sizeof(words));
}

/* sqrt(-2 ln U), where U is a multiple of 2^-24 in (0, 1]. */
static float radius_of(uint32_t word)
{
    float whole = (float)((word >> 8) + 1);
    int32_t bits;
    memcpy(&bits, &whole, sizeof(bits));
    int32_t exponent = (bits - LH_ZO_ROOT_HALF_BITS) >> 23;
    bits -= exponent * (1 << 23);
    float mantissa;
    memcpy(&mantissa, &bits, sizeof(mantissa));
    float f = mantissa - 1.0f;
    float square = f * f;
    float series = LH_ZO_L6 * f + LH_ZO_L5;
    series = series * f + LH_ZO_L4;
    series = series * f + LH_ZO_L3;
    series = series * f + LH_ZO_L2;
    series = series * f + LH_ZO_L1;
    series = series * f + LH_ZO_L0;
    float log = (f - square * 0.5f) + (square * f) * series;
    log = (float)(exponent - 24) * LH_ZO_LN_2 + log;
    return sqrtf(log * -2.0f);
}

/* cos(2 pi V) and sin(2 pi V). The two highest bits of word count quarter turns. */
static void turn_of(uint32_t word, float *cosine_out, float *sine_out)
{
    int32_t rest = (int32_t)((word << 2) & ~UINT32_C(0xFF));
    float x = (float)rest * LH_ZO_ANGLE_SCALE;
    float square = x * x;
    float sine = (LH_ZO_S2 * square + LH_ZO_S1) * square + LH_ZO_S0;
    sine = x + (x * square) * sine;
    float cosine = LH_ZO_C1 * square + LH_ZO_C0;
    cosine = (1.0f - square * 0.5f) + (square * square) * cosine;
    uint32_t quarter = (word + (UINT32_C(1) << 29)) >> 30;
    float at_cosine = quarter % 2 ? sine : cosine;
    float at_sine = quarter % 2 ? cosine : sine;
    *cosine_out = quarter == 1 || quarter == 2 ? -at_cosine : at_cosine;
    *sine_out = quarter >= 2 ? -at_sine : at_sine;
}

static void words_make(const struct lh_zo_stream *stream, uint64_t counter,
                       uint32_t words_out[LH_ZO_WORDS])
{
    const uint32_t key[2] = {(uint32_t)stream->seed, (uint32_t)(stream->seed >> 32)};
    const uint32_t counters[4] = {(uint32_t)counter,
                                  (uint32_t)(counter >> 32) | stream->sample << 16, stream->param,
                                  stream->step};
    lh_zo_philox(counters, key, words_out);
}

void lh_zo_words_ref(uint32_t *words, uint64_t first, uint64_t count,
                     const struct lh_zo_stream *stream)
{
    for (uint64_t i = 0; i < count / LH_ZO_BLOCK * LH_ZO_COUNTERS; i++) {
        uint32_t *at = words + i / LH_ZO_COUNTERS * LH_ZO_BLOCK + i % LH_ZO_COUNTERS;
        uint32_t made[LH_ZO_WORDS];
        words_make(stream, first / LH_ZO_WORDS + i, made);
        for (int k = 0; k < LH_ZO_WORDS; k++)
            at[k * LH_ZO_COUNTERS] = made[k];
    }
}

/* Generate z for the elements of a block that one counter covers. */
static void draw(const struct lh_zo_stream *stream, uint64_t counter, float z_out[LH_ZO_WORDS])
{
    uint32_t words[LH_ZO_WORDS];
    words_make(stream, counter, words);
    for (int i = 0; i < LH_ZO_WORDS; i += 2) {
        float cosine, sine;
        float radius = radius_of(words[i]);
        turn_of(words[i + 1], &cosine, &sine);
        z_out[i] = radius * cosine;
        z_out[i + 1] = radius * sine;
    }
}

static float applied(const struct lh_zo_op *op, float value, float z)
{
    switch (op->kind) {
    case LH_ZO_OP_PERTURB:
        return value + z * op->scale;
    case LH_ZO_OP_UPDATE:
        z = z * op->scale;
        if (op->decay != 0)
            z = z + value * op->decay;
        return value - z * op->lr;
    case LH_ZO_OP_DRAW:
    case LH_ZO_OP_ROUND: /* handled by round_all() */
        break;
    }
    return z;
}

/* Add a random part of the distance to the next number to the magnitude, then truncate it. */
uint32_t lh_zo_rounded(uint32_t bits, uint32_t word, enum lh_zo_format format)
{
    static const struct lh_zo_shape shapes[] = {[LH_ZO_FORMAT_BF16] = LH_ZO_SHAPE_BF16,
                                                [LH_ZO_FORMAT_F16] = LH_ZO_SHAPE_F16,
                                                [LH_ZO_FORMAT_F8] = LH_ZO_SHAPE_F8};
    const struct lh_zo_shape *shape = &shapes[format];
    const uint32_t sign = bits & UINT32_C(0x80000000), magnitude = bits - sign;
    const uint32_t exponent = magnitude >> 23 > 0 ? magnitude >> 23 : 1;
    uint32_t dropped = 23 - shape->mantissa_bits, out;
    if (format == LH_ZO_FORMAT_F32)
        return bits;
    if (magnitude > UINT32_C(0x7F800000))
        return sign | LH_ZO_NAN;
    if (exponent >= shape->exponent_min) {
        out = (magnitude + (word >> (32 - dropped))) >> dropped << dropped;
    } else {
        /* Count in units of the smallest number. If more than 31 bits would be dropped, 31 suffice:
           the value is so small that only the largest random words round it up to 1. */
        uint32_t whole = magnitude & UINT32_C(0x7FFFFF);
        whole |= (uint32_t)(magnitude >> 23 > 0) << 23;
        dropped += shape->exponent_min - exponent;
        if (dropped > 31) {
            whole >>= dropped - 31 < 31 ? dropped - 31 : 31;
            dropped = 31;
        }
        float number = (float)((whole + (word >> (32 - dropped))) >> dropped);
        number *= ldexpf(1, (int)(shape->exponent_min - shape->mantissa_bits) - 127);
        memcpy(&out, &number, sizeof(out));
    }
    return sign | (out < shape->max ? out : shape->max);
}

static void round_all(const struct lh_zo_op *op, uint64_t counter, float *at)
{
    uint32_t words[LH_ZO_WORDS], bits;
    words_make(&op->stream, counter, words);
    for (int i = 0; i < LH_ZO_WORDS; i++, at += LH_ZO_COUNTERS) {
        memcpy(&bits, at, sizeof(bits));
        bits = lh_zo_rounded(bits, words[i], op->format);
        memcpy(at, &bits, sizeof(bits));
    }
}

void lh_zo_ref(float *values, const float *source, uint64_t first, uint64_t count,
               const struct lh_zo_op *ops, uint32_t op_count)
{
    if (source != values)
        memcpy(values, source, count * sizeof(*values));
    for (uint64_t i = 0; i < count / LH_ZO_BLOCK * LH_ZO_COUNTERS; i++) {
        float *at = values + i / LH_ZO_COUNTERS * LH_ZO_BLOCK + i % LH_ZO_COUNTERS;
        float z[LH_ZO_WORDS] = {0};
        for (uint32_t j = 0; j < op_count; j++) {
            uint64_t counter = first / LH_ZO_WORDS + i;
            if (ops[j].kind == LH_ZO_OP_ROUND) {
                round_all(&ops[j], counter, at);
                continue;
            }
            if (!ops[j].is_same)
                draw(&ops[j].stream, counter, z);
            for (int k = 0; k < LH_ZO_WORDS; k++)
                at[k * LH_ZO_COUNTERS] = applied(&ops[j], at[k * LH_ZO_COUNTERS], z[k]);
        }
    }
}
