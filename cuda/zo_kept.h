/*
 * Conversions between the formats of parameters between steps and of the values that computation
 * reads, with the same bits as lh_zo_rounded(), lh_zo_widen_ref(), lh_zo_narrow_ref() and
 * lh_zo_cast_ref() (csrc/compute).
 */
#ifndef CUDA_ZO_KEPT_H
#define CUDA_ZO_KEPT_H

#include "zo_numbers.h"

ZO_FUNCTION struct lh_zo_shape zo_shape_of(enum lh_zo_format format)
{
    const struct lh_zo_shape bf16 = LH_ZO_SHAPE_BF16, f16 = LH_ZO_SHAPE_F16, f8 = LH_ZO_SHAPE_F8;
    return format == LH_ZO_FORMAT_BF16 ? bf16 : format == LH_ZO_FORMAT_F16 ? f16 : f8;
}

/* Round a number stochastically to format, by a random word. */
ZO_FUNCTION float zo_rounded(float value, uint32_t word, enum lh_zo_format format)
{
    const struct lh_zo_shape shape = zo_shape_of(format);
    const uint32_t sign = zo_bits(value) & UINT32_C(0x80000000), magnitude = zo_bits(value) ^ sign;
    const uint32_t exponent = magnitude >> 23 > 0 ? magnitude >> 23 : 1;
    uint32_t lost = 23 - shape.mantissa_bits, out;
    if (format == LH_ZO_FORMAT_F32)
        return value;
    if (magnitude > UINT32_C(0x7F800000))
        return zo_float(sign | LH_ZO_NAN);
    if (exponent >= shape.exponent_min) {
        out = (magnitude + (word >> (32 - lost))) >> lost << lost;
    } else {
        uint32_t whole = magnitude & UINT32_C(0x7FFFFF);
        whole |= magnitude >> 23 > 0 ? UINT32_C(0x800000) : 0;
        lost += shape.exponent_min - exponent;
        if (lost > 31) {
            whole >>= lost - 31 < 31 ? lost - 31 : 31;
            lost = 31;
        }
        whole = (whole + (word >> (32 - lost))) >> lost;
        /* Exact, because the number has so few bits. */
        float unit = zo_float((shape.exponent_min - shape.mantissa_bits) << 23);
        out = zo_bits(ZO_MUL((float)whole, unit));
    }
    return zo_float(sign | (out < shape.max ? out : shape.max));
}

/* Load element index of the state at address. */
ZO_FUNCTION float zo_kept_load(uint64_t address, int64_t index, enum lh_zo_format format)
{
    const uintptr_t at = (uintptr_t)address;
    const struct lh_zo_shape shape = zo_shape_of(format);
    if (format == LH_ZO_FORMAT_F32)
        return ((const float *)at)[index];
    bool is_byte = format == LH_ZO_FORMAT_F8;
    uint32_t bits = is_byte ? ((const uint8_t *)at)[index] : ((const uint16_t *)at)[index];
    uint32_t sign_bit = is_byte ? 0x80 : 0x8000, magnitude = bits & (sign_bit - 1);
    uint32_t sign = bits & sign_bit ? UINT32_C(0x80000000) : 0;
    if (format == LH_ZO_FORMAT_BF16)
        return zo_float(bits << 16);
    if (is_byte && magnitude == 0x7F)
        return zo_float(sign | LH_ZO_NAN | UINT32_C(7) << 20);
    if (!is_byte && magnitude > 0x7C00)
        return zo_float(sign | LH_ZO_NAN | magnitude << 13);
    if (!is_byte && magnitude == 0x7C00)
        return zo_float(sign | UINT32_C(0x7F800000));
    /* Correct the exponent's bias by a multiplication, which handles subnormal numbers, too. */
    float larger = zo_float((shape.exponent_min - 1 + 127) << 23);
    float wide = ZO_MUL(zo_float(magnitude << (23 - shape.mantissa_bits)), larger);
    return zo_float(sign | zo_bits(wide));
}

/* Store a value that is representable in the format, or the NaN of zo_rounded(). */
ZO_FUNCTION void zo_kept_store(uint64_t address, int64_t index, float value,
                               enum lh_zo_format format)
{
    const uintptr_t at = (uintptr_t)address;
    const struct lh_zo_shape shape = zo_shape_of(format);
    const uint32_t bits = zo_bits(value), magnitude = bits & UINT32_C(0x7FFFFFFF);
    if (format == LH_ZO_FORMAT_F32) {
        ((float *)at)[index] = value;
        return;
    }
    if (format == LH_ZO_FORMAT_BF16) {
        ((uint16_t *)at)[index] = (uint16_t)(bits >> 16);
        return;
    }
    float smaller = zo_float((127 + 1 - shape.exponent_min) << 23);
    uint32_t out = zo_bits(ZO_MUL(zo_float(magnitude), smaller)) >> (23 - shape.mantissa_bits);
    if (format == LH_ZO_FORMAT_F16) {
        out = magnitude > UINT32_C(0x7F800000) ? 0x7E00 : out;
        ((uint16_t *)at)[index] = (uint16_t)(out | (bits >> 16 & 0x8000));
    } else {
        out = magnitude > UINT32_C(0x7F800000) ? 0x7F : out;
        ((uint8_t *)at)[index] = (uint8_t)(out | (bits >> 24 & 0x80));
    }
}

/* Store any value, rounded to nearest, ties to even. format: not F8. */
ZO_FUNCTION void zo_value_store(uint64_t address, int64_t index, float value,
                                enum lh_zo_format format)
{
    const uintptr_t at = (uintptr_t)address;
    const uint32_t bits = zo_bits(value), magnitude = bits & UINT32_C(0x7FFFFFFF);
    if (format == LH_ZO_FORMAT_F32) {
        ((float *)at)[index] = value;
        return;
    }
    uint32_t out;
    if (format == LH_ZO_FORMAT_BF16) {
        bool is_nan = magnitude > UINT32_C(0x7F800000);
        out = is_nan ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    } else {
        const uint32_t half = UINT32_C(126)
                              << 23; /* of fp32: its last bit is fp16's least number */
        if (magnitude > UINT32_C(0x7F800000))
            out = 0x7E00;
        else if (magnitude >= UINT32_C(0x477FF000))
            out = 0x7C00;
        else if (magnitude >= UINT32_C(113) << 23)
            out = (magnitude - (UINT32_C(112) << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
        else
            out = zo_bits(ZO_ADD(zo_float(magnitude), zo_float(half))) - half;
        out |= bits >> 16 & 0x8000;
    }
    ((uint16_t *)at)[index] = (uint16_t)out;
}

#endif
