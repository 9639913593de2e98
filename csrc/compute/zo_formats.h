/*
 * Vectorized conversions between fp32 and other formats. Each file that includes this defines the
 * names of its functions (WIDEN, NARROW, CAST) and the elements per vector (LANES), and then, after
 * the include, the conversions of fp16, which have instructions everywhere, and of fp8, which use
 * fp16: scaled by 1/256, a number of fp8 has the same bits in fp16, shifted left by seven. As an
 * integer, a NaN is above all numbers, so the minimum of a NaN and fp8's NaN is fp8's NaN.
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

/* half_cast() rounds to nearest, ties to even. In both functions a NaN becomes a quiet NaN. */
static INLINE floats half_widened(halves half);
static INLINE halves half_cast(floats values);
/* Convert F8_LANES elements; f8_narrow takes only numbers of fp8, or NaNs. */
static INLINE void f8_widen(float *values, const uint8_t *kept);
static INLINE void f8_narrow(uint8_t *kept, const float *values);

/* Convert all whole vectors; the caller passes the rest to the definition. */
#define EACH(from, to, in, out, expression)                                                        \
    for (; i + LANES <= count; i += LANES) {                                                       \
        in now;                                                                                    \
        memcpy(&now, (from) + i, sizeof(now));                                                     \
        out made = (expression);                                                                   \
        memcpy((to) + i, &made, sizeof(made));                                                     \
    }

/* The results are those of lh_zo_widen_ref(). */
static INLINE floats bf16_widened(halves kept)
{
    return (floats)(__builtin_convertvector(kept, words) << 16);
}

/* Drop the lower 16 bits, which are 0 or have already been used for rounding. */
static INLINE halves bf16_narrowed(words bits)
{
    return __builtin_convertvector(bits >> 16, halves);
}

/* The results are those of lh_zo_cast_ref(). */
static INLINE halves bf16_cast(words bits)
{
    ints is_nan = (ints)(bits & UINT32_C(0x7FFFFFFF)) > 0x7F800000;
    words nearest = bits + 0x7FFF + ((bits >> 16) & 1);
    nearest = (nearest & ~(words)is_nan) | ((words)is_nan & UINT32_C(0x7FC00000));
    return bf16_narrowed(nearest);
}

/* The instruction preserves a NaN's payload, but the result may keep only the NaN's sign. */
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
