/*
 * The definition of formats with scales in grains: blocks of GGUF. The values are those of classes
 * Q8_0, Q4_K and Q6_K in gguf-py's gguf/quants.py.
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

void lh_unpack_grain_ref(uint32_t format, const uint8_t *grain, float *values)
{
    switch ((enum lh_unpack_format)format) {
    case LH_UNPACK_FORMAT_Q8_0:
        q8_0(grain, values);
        break;
    case LH_UNPACK_FORMAT_Q4_K:
        q4_k(grain, values);
        break;
    default:
        LH_ASSERT(format == LH_UNPACK_FORMAT_Q6_K);
        q6_k(grain, values);
        break;
    }
}
