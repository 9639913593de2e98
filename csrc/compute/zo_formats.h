/*
 * Elements of other formats from fp32 and to it, in vectors: each file that includes this says what
 * its functions are called (WIDEN, NARROW, CAST), how many elements a vector has (LANES), and
 * gives, behind it, the conversions of fp16, which have instructions everywhere, and of fp8. Those
 * go by way of fp16: 256 times smaller, numbers of fp8 have the same bits there, seven places
 * further up. A NaN's lie above all numbers', so that the lesser of it and fp8's NaN is that.
 */
#ifndef LH_COMPUTE_ZO_FORMATS_H
#define LH_COMPUTE_ZO_FORMATS_H

#include <string.h>

#include "compute/zo_kernels.h"

#define NAN_F8 0x7F
#define F8_LANES (2 * LANES)
#define INLINE inline __attribute__((always_inline))

typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef float floats __attribute__((vector_size(LANES * 4)));

/* To nearest, ties to even. A NaN stays one, and quiet. */
static INLINE floats half_widened(halves half);
static INLINE halves half_cast(floats values);
/* F8_LANES elements; narrow: of numbers of fp8, or NaNs. */
static INLINE void f8_widen(float *values, const uint8_t *kept);
static INLINE void f8_narrow(uint8_t *kept, const float *values);

/* All elements of vectors, and then those that fill none, by the definition. */
#define EACH(from, to, in, out, expression)                                                        \
    for (; i + LANES <= count; i += LANES) {                                                       \
        in now;                                                                                    \
        memcpy(&now, (from) + i, sizeof(now));                                                     \
        out made = (expression);                                                                   \
        memcpy((to) + i, &made, sizeof(made));                                                     \
    }

/* Elements as lh_zo_widen_ref() has them. */
static INLINE floats bf16_widened(halves kept)
{
    return (floats)(__builtin_convertvector(kept, words) << 16);
}

/* Its lower bits are 0. */
static INLINE halves bf16_narrowed(words bits)
{
    return __builtin_convertvector(bits >> 16, halves);
}

/* As lh_zo_cast_ref() has them. */
static INLINE halves bf16_cast(words bits)
{
    ints is_nan = (ints)(bits & UINT32_C(0x7FFFFFFF)) > 0x7F800000;
    words nearest = bits + 0x7FFF + ((bits >> 16) & 1);
    nearest = (nearest & ~(words)is_nan) | ((words)is_nan & UINT32_C(0x7FC00000));
    return bf16_narrowed(nearest);
}

/* The instruction keeps a NaN's payload, of which only the sign is to stay. */
static INLINE halves f16_cast(words bits)
{
    ints is_nan = (ints)(bits & UINT32_C(0x7FFFFFFF)) > 0x7F800000;
    bits = (bits & ~((words)is_nan & UINT32_C(0x7FFFFF))) | ((words)is_nan & LH_ZO_NAN);
    return half_cast((floats)bits);
}

void WIDEN(float *values, const void *kept, enum lh_zo_format format, uint64_t count)
{
    const uint64_t size = lh_zo_format_bytes(format);
    const uint16_t *halves_kept = kept;
    const uint8_t *bytes_kept = kept;
    uint64_t i = 0;
    if (format == LH_ZO_FORMAT_BF16)
        EACH(halves_kept, values, halves, floats, bf16_widened(now))
    else if (format == LH_ZO_FORMAT_F16)
        EACH(halves_kept, values, halves, floats, half_widened(now))
    else
        for (; i + F8_LANES <= count; i += F8_LANES)
            f8_widen(values + i, bytes_kept + i);
    lh_zo_widen_ref(values + i, bytes_kept + i * size, format, count - i);
}

void NARROW(void *kept, const float *values, enum lh_zo_format format, uint64_t count)
{
    const uint64_t size = lh_zo_format_bytes(format);
    uint16_t *halves_kept = kept;
    uint8_t *bytes_kept = kept;
    uint64_t i = 0;
    if (format == LH_ZO_FORMAT_BF16)
        EACH(values, halves_kept, words, halves, bf16_narrowed(now))
    else if (format == LH_ZO_FORMAT_F16)
        EACH(values, halves_kept, floats, halves, half_cast(now))
    else
        for (; i + F8_LANES <= count; i += F8_LANES)
            f8_narrow(bytes_kept + i, values + i);
    lh_zo_narrow_ref(bytes_kept + i * size, values + i, format, count - i);
}

void CAST(void *cast, const float *values, enum lh_zo_format format, uint64_t count)
{
    uint16_t *halves_cast = cast;
    uint64_t i = 0;
    if (format == LH_ZO_FORMAT_BF16)
        EACH(values, halves_cast, words, halves, bf16_cast(now))
    else
        EACH(values, halves_cast, words, halves, f16_cast(now))
    lh_zo_cast_ref(halves_cast + i, values + i, format, count - i);
}

#endif
