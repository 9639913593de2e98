/*
 * IEEE half precision (binary16), and rounding to bf16, in integer arithmetic: the definition that
 * SIMD instructions are compared with. Neither the rounding mode nor the flushing of denormals
 * affects the results.
 *
 * Pure; any thread.
 */
#ifndef LH_COMPUTE_HALF_H
#define LH_COMPUTE_HALF_H

#include <string.h>

#include "base/base.h"

/* Convert half to the bits of a float, exactly; a NaN becomes quiet. */
static inline uint32_t lh_half_widen(uint16_t half)
{
    uint32_t magnitude = half & UINT32_C(0x7FFF);
    uint32_t sign = (half & UINT32_C(0x8000)) << 16;
    float denormal = (float)magnitude * 0x1p-24f; /* a normal float */
    uint32_t bits;

    memcpy(&bits, &denormal, sizeof(bits));
    if (magnitude >= 0x400)
        bits = (magnitude << 13) + (UINT32_C(112) << 23);
    if (magnitude >= 0x7C00)
        bits += UINT32_C(112) << 23;
    if (magnitude > 0x7C00)
        bits |= UINT32_C(1) << 22;
    return sign | bits;
}

/*
 * Round a float, given by its bits, to nearest, ties to even (torch's .half()). Magnitudes from
 * 65520 on become infinity, and every NaN becomes 0x7E00 with the NaN's sign.
 */
static inline uint16_t lh_half_round(uint32_t bits)
{
    uint32_t magnitude = bits & UINT32_C(0x7FFFFFFF);
    uint32_t sign = (bits >> 16) & UINT32_C(0x8000);
    uint32_t mantissa = (magnitude & UINT32_C(0x7FFFFF)) | UINT32_C(0x800000);
    uint32_t shift = 126 - (magnitude >> 23); /* for a denormal, in units of 2^-24 */
    uint32_t half;

    if (magnitude > UINT32_C(0x7F800000))
        half = 0x7E00;
    else if (magnitude >= UINT32_C(0x477FF000))
        half = 0x7C00;
    else if (magnitude >= UINT32_C(0x38800000))
        half = (magnitude - (UINT32_C(112) << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    else if (magnitude > UINT32_C(0x33000000)) /* 2^-25 itself ties to 0 */
        half = (mantissa + (UINT32_C(1) << (shift - 1)) - 1 + ((mantissa >> shift) & 1)) >> shift;
    else
        half = 0;
    return (uint16_t)(sign | half);
}

/* The same for bf16 (torch's .bfloat16()): every NaN becomes 0x7FC0. */
static inline uint16_t lh_bf16_round(uint32_t bits)
{
    bool is_nan = (bits & UINT32_C(0x7FFFFFFF)) > UINT32_C(0x7F800000);
    uint32_t rounded = (bits + UINT32_C(0x7FFF) + ((bits >> 16) & 1)) >> 16;

    return (uint16_t)(is_nan ? UINT32_C(0x7FC0) : rounded);
}

#endif
