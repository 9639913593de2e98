/* lh_zo_rounded() in the vectors of zo_vectors.h, for zo_body.h. */
#ifndef LH_COMPUTE_ZO_ROUND_H
#define LH_COMPUTE_ZO_ROUND_H

#include "compute/zo_kernels.h"
#include "compute/zo_vectors.h"

/* where is ~0 or 0 in each lane. */
static INLINE words chosen(ints where, words yes, words no)
{
    return (yes & (words)where) | (no & ~(words)where);
}

/* As lh_zo_rounded(), which says what it is; shape is a constant. */
static INLINE words rounded(words bits, words random, const struct lh_zo_shape shape)
{
    const words none = {0};
    const uint32_t dropped = 23 - shape.mantissa_bits;
    words sign = bits & UINT32_C(0x80000000);
    words magnitude = bits ^ sign;
    words out = (magnitude + (random >> (32 - dropped))) >> dropped << dropped;
    if (shape.exponent_min > 1) {
        ints is_low = (ints)magnitude < (ints)(none + (shape.exponent_min << 23));
        words exponent = magnitude >> 23;
        words is_normal = exponent > 0; /* ~0 */
        words whole = (magnitude & UINT32_C(0x7FFFFF)) | (is_normal & UINT32_C(0x800000));
        words lost = dropped + shape.exponent_min - exponent - (is_normal + 1);
        /* What is lost of larger numbers is below 1 bit, and not looked at. */
        words more = (words)((ints)lost > 31) & (lost - 31);
        lost = chosen(is_low, lost - more, none + 31);
        more = chosen((ints)more > 31, none + 31, more);
        whole = ((whole >> more) + (random >> (32 - lost))) >> lost;
        uint32_t unit = (shape.exponent_min - shape.mantissa_bits) << 23;
        floats number = __builtin_convertvector((ints)whole, floats) * (floats)(none + unit);
        out = chosen(is_low, (words)number, out);
    }
    out = chosen((ints)out < (ints)(none + shape.max), out, none + shape.max);
    out = chosen((ints)magnitude > 0x7F800000, none + LH_ZO_NAN, out);
    return sign | out;
}

#endif
