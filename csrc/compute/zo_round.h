/*
 * lh_zo_rounded() with the vectors of zo_vectors.h, for zo_body.h: without branches if all elements
 * are plain (see rounds_are_plain()), otherwise one element at a time.
 */
#ifndef LH_COMPUTE_ZO_ROUND_H
#define LH_COMPUTE_ZO_ROUND_H

#include <string.h>

#include "compute/zo_kernels.h"
#include "compute/zo_vectors.h"

#if VECTOR_BYTES == 64

/* Shift right. Counts below 0 give unspecified results, those above 31 give 0. */
static INLINE words shifted(words bits, words counts)
{
    return (words)_mm512_srlv_epi32((__m512i)bits, (__m512i)counts);
}

/* The minimum of signed integers. */
static INLINE words lesser(words a, words b)
{
    return (words)_mm512_min_epi32((__m512i)a, (__m512i)b);
}

/* The maximum of signed integers. */
static INLINE words greater(words a, words b)
{
    return (words)_mm512_max_epi32((__m512i)a, (__m512i)b);
}

/* Whether a is above b in any lane. */
static INLINE bool is_any_above(words a, words b)
{
    return _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b) != 0;
}

/* Select yes where a is below b, no elsewhere. */
static INLINE words below_or(words a, words b, words yes, words no)
{
    __mmask16 is_below = _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b);
    return (words)_mm512_mask_blend_epi32(is_below, (__m512i)no, (__m512i)yes);
}

#elif VECTOR_BYTES == 32

/* Shift right. Counts below 0 give unspecified results, those above 31 give 0. */
static INLINE words shifted(words bits, words counts)
{
    return (words)_mm256_srlv_epi32((__m256i)bits, (__m256i)counts);
}

/* The minimum of signed integers. */
static INLINE words lesser(words a, words b)
{
    return (words)_mm256_min_epi32((__m256i)a, (__m256i)b);
}

/* The maximum of signed integers. */
static INLINE words greater(words a, words b)
{
    return (words)_mm256_max_epi32((__m256i)a, (__m256i)b);
}

/* Whether a is above b in any lane. */
static INLINE bool is_any_above(words a, words b)
{
    __m256i is_above = _mm256_cmpgt_epi32((__m256i)a, (__m256i)b);
    return !_mm256_testz_si256(is_above, is_above);
}

/* Select yes where a is below b, no elsewhere. */
static INLINE words below_or(words a, words b, words yes, words no)
{
    __m256i is_below = _mm256_cmpgt_epi32((__m256i)b, (__m256i)a);
    return (words)_mm256_blendv_epi8((__m256i)no, (__m256i)yes, is_below);
}

#else

/* Shift right. Counts below 0 give unspecified results, those above 31 give 0. */
static INLINE words shifted(words bits, words counts)
{
    return (words)vshlq_u32((uint32x4_t)bits, vnegq_s32((int32x4_t)counts));
}

/* The minimum of signed integers. */
static INLINE words lesser(words a, words b)
{
    return (words)vminq_s32((int32x4_t)a, (int32x4_t)b);
}

/* The maximum of signed integers. */
static INLINE words greater(words a, words b)
{
    return (words)vmaxq_s32((int32x4_t)a, (int32x4_t)b);
}

/* Whether a is above b in any lane. */
static INLINE bool is_any_above(words a, words b)
{
    return vmaxvq_u32(vcgtq_s32((int32x4_t)a, (int32x4_t)b)) != 0;
}

/* Select yes where a is below b, no elsewhere. */
static INLINE words below_or(words a, words b, words yes, words no)
{
    uint32x4_t is_below = vcltq_s32((int32x4_t)a, (int32x4_t)b);
    return (words)vbslq_u32(is_below, (uint32x4_t)yes, (uint32x4_t)no);
}

#endif

/* The shape of a format other than F32. */
static INLINE struct lh_zo_shape shape_of(enum lh_zo_format format)
{
    const struct lh_zo_shape bf16 = LH_ZO_SHAPE_BF16, f16 = LH_ZO_SHAPE_F16, f8 = LH_ZO_SHAPE_F8;
    return format == LH_ZO_FORMAT_BF16 ? bf16 : format == LH_ZO_FORMAT_F16 ? f16 : f8;
}

/* Whether no element is in the binade of the format's largest number, or beyond. */
static bool rounds_are_plain(const float *source, uint64_t count, enum lh_zo_format format)
{
    const words none = {0};
    words most = {0};
    for (uint64_t i = 0; i < count; i += sizeof(words) / 4) {
        words bits;
        memcpy(&bits, source + i, sizeof(bits));
        most = greater(most, bits & UINT32_C(0x7FFFFFFF));
    }
    return !is_any_above(most, none + (shape_of(format).max & 0x7F800000) - 1);
}

/* Round elements some of which are NaN or may exceed the format's largest number. */
static void round_rare(enum lh_zo_format format, float *values, const float *source,
                       const words *random, uint64_t count)
{
    const uint32_t *word = (const uint32_t *)random;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, source + i, sizeof(bits));
        bits = lh_zo_rounded(bits, word[i], format);
        memcpy(values + i, &bits, sizeof(bits));
    }
}

/* Round plain elements like lh_zo_rounded(), which explains the method. format is a constant. */
static INLINE words rounded(words bits, words random, enum lh_zo_format format)
{
    const words none = {0};
    const struct lh_zo_shape shape = shape_of(format);
    const uint32_t lost = 23 - shape.mantissa_bits;
    words out = (bits + (random >> (32 - lost))) & ~((UINT32_C(1) << lost) - 1);
    if (shape.exponent_min == 1)
        return out;
    /* fp32's denormals have no leading bit; setting it is harmless, as denormals become 0 here. */
    words magnitude = bits & UINT32_C(0x7FFFFFFF);
    words whole = (magnitude & UINT32_C(0x7FFFFF)) | UINT32_C(0x800000);
    words count = lost + shape.exponent_min - (magnitude >> 23);
    words last = lesser(count, none + 31);
    whole = shifted(whole, count - last) + shifted(random, 32 - last);
    const words unit = none + ((shape.exponent_min - shape.mantissa_bits) << 23);
    floats low = __builtin_convertvector((ints)shifted(whole, last), floats) * (floats)unit;
    return below_or(magnitude, none + (shape.exponent_min << 23),
                    (words)low | (bits & UINT32_C(0x80000000)), out);
}

#endif
