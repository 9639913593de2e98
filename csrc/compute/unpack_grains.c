/*
 * The definition of formats with scales in grains: blocks of GGUF. The values are those of the
 * classes with their names in gguf-py's gguf/quants.py; but see lh_unpack_half_power().
 */
#include <string.h>

#include "base/assert.h"
#include "compute/half.h"
#include "compute/unpack_kernels.h"

static float half_at(const uint8_t *at)
{
    uint16_t half;
    float value;
    memcpy(&half, at, sizeof(half));
    uint32_t bits = lh_half_widen(half);
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static void q8_0(const uint8_t *grain, float *values)
{
    float scale = half_at(grain);
    for (int i = 0; i < 32; i++)
        values[i] = (float)(int8_t)grain[2 + i] * scale;
}

void lh_unpack_q4_k_scales(const uint8_t *grain, uint8_t *scales, uint8_t *minima)
{
    /* Six bits each: four scales, four minima, then the low bits of the other eight. */
    const uint32_t six = UINT32_C(0x3F3F3F3F), low = UINT32_C(0x0F0F0F0F);
    uint32_t words[3];
    memcpy(words, grain + 4, sizeof(words));
    uint32_t times[2] = {words[0] & six, (words[2] & low) | (words[0] >> 2 & six & ~low)};
    uint32_t less[2] = {words[1] & six, (words[2] >> 4 & low) | (words[1] >> 2 & six & ~low)};
    memcpy(scales, times, sizeof(times));
    memcpy(minima, less, sizeof(less));
}

static void q4_k(const uint8_t *grain, float *values)
{
    float scale = half_at(grain), minimum = half_at(grain + 2);
    uint8_t times[8], less[8];
    lh_unpack_q4_k_scales(grain, times, less);
    for (uint32_t part = 0; part < 8; part++) {
        float factor = scale * (float)times[part], offset = minimum * (float)less[part];
        const uint8_t *packed = grain + 16 + part / 2 * 32;
        for (uint32_t i = 0; i < 32; i++) {
            float product = factor * (float)(part % 2 == 0 ? packed[i] & 15 : packed[i] >> 4);
            values[part * 32 + i] = product - offset;
        }
    }
}

static void q6_k(const uint8_t *grain, float *values)
{
    const uint8_t *high = grain + 128, *scales = grain + 192;
    float scale = half_at(grain + 208);
    for (uint32_t i = 0; i < LH_UNPACK_GRAIN_MAX; i++) {
        uint32_t half = i / 128, at = i % 128;
        uint32_t low = grain[half * 64 + at % 64] >> (at / 64 * 4) & 15;
        uint32_t bits = low | (high[half * 32 + at % 32] >> (at / 32 * 2) & 3) << 4;
        float factor = scale * (float)(int8_t)scales[i / 16];
        values[i] = factor * (float)((int32_t)bits - 32);
    }
}

const int8_t lh_unpack_iq4[LH_UNPACK_TABLE_COUNT] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                     1,    13,   25,  38,  53,  69,  89,  113};
const int8_t lh_unpack_doubled[LH_UNPACK_TABLE_COUNT] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                         0, -1, -2, -3, -4, -6, -8, -12};

/* 32 elements of 4 bits: first those in the low bits of 16 bytes, then those in the high bits. */
static void looked_up(const uint8_t *packed, const int8_t *table, float scale, float *values)
{
    for (int i = 0; i < 16; i++) {
        values[i] = scale * (float)table[packed[i] & 15];
        values[i + 16] = scale * (float)table[packed[i] >> 4];
    }
}

float lh_unpack_half_power(uint8_t byte)
{
    uint32_t bits = byte < 2 ? UINT32_C(0x00200000) << byte : ((uint32_t)byte - 1) << 23;
    float value;
    if (byte == UINT8_MAX)
        bits = UINT32_C(0x7FC00000);
    memcpy(&value, &bits, sizeof(value));
    return value;
}

void lh_unpack_iq4_xs_scales(const uint8_t *grain, int8_t *scales)
{
    uint16_t high;
    memcpy(&high, grain + 2, sizeof(high));
    for (uint32_t i = 0; i < 8; i++) {
        uint32_t low = grain[4 + i / 2] >> (i % 2 * 4) & 15;
        scales[i] = (int8_t)((int32_t)(low | (high >> (2 * i) & 3) << 4) - 32);
    }
}

static void iq4_xs(const uint8_t *grain, float *values)
{
    int8_t scales[8];
    lh_unpack_iq4_xs_scales(grain, scales);
    for (uint32_t i = 0; i < 8; i++)
        looked_up(grain + 8 + 16 * i, lh_unpack_iq4, half_at(grain) * (float)scales[i],
                  values + 32 * i);
}

void lh_unpack_grain_ref(uint32_t format, const uint8_t *grain, float *values)
{
    switch ((enum lh_unpack_format)format) {
    case LH_UNPACK_FORMAT_Q8_0:
        q8_0(grain, values);
        break;
    case LH_UNPACK_FORMAT_Q4_K:
        q4_k(grain, values);
        break;
    case LH_UNPACK_FORMAT_IQ4_NL:
        looked_up(grain + 2, lh_unpack_iq4, half_at(grain), values);
        break;
    case LH_UNPACK_FORMAT_IQ4_XS:
        iq4_xs(grain, values);
        break;
    case LH_UNPACK_FORMAT_MXFP4:
        looked_up(grain + 1, lh_unpack_doubled, lh_unpack_half_power(grain[0]), values);
        break;
    default:
        LH_ASSERT(format == LH_UNPACK_FORMAT_Q6_K);
        q6_k(grain, values);
        break;
    }
}
