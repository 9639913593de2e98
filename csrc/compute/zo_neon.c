/* Generate z with NEON, four elements at a time. */
#if defined(__aarch64__)

#include <arm_neon.h>
#include <stdint.h>

#define VECTOR_BYTES 16
#define KERNEL lh_zo_neon
#define WORDS lh_zo_words_neon
#define REGISTER "+w"
#define LANE_COUNTERS 0, 1
#define CHAINS 4
#define CHAIN_DELAY 2
#define ROUND_TIME 8
#define ROUND_9_DELAY 6
#define PAIR_TIME 26
#define RADIUS_TIME 3
#define TURN_DELAY 16
#define TURN_TIME 5
#define END_DELAY 1

#include "compute/zo_vectors.h"

static INLINE longs multiply32(longs left, longs right)
{
    return (longs)vmull_u32(vmovn_u64((uint64x2_t)left), vmovn_u64((uint64x2_t)right));
}

static INLINE longs xor3(longs late, longs early, longs constant)
{
    early ^= constant;
    PIN(early);
    return late ^ early;
}

static INLINE words lowers_of(longs a, longs b)
{
    return (words)vuzp1q_u32((uint32x4_t)a, (uint32x4_t)b);
}

static INLINE words uppers_of(longs a, longs b)
{
    return (words)vuzp2q_u32((uint32x4_t)a, (uint32x4_t)b);
}

static INLINE floats root(floats value)
{
    return (floats)vsqrtq_f32((float32x4_t)value);
}

static INLINE void turn_quarter(words quarter, floats *cosine, floats *sine)
{
    uint32x4_t is_odd = vtstq_u32((uint32x4_t)quarter, vdupq_n_u32(1U << 30));
    floats at_cosine = *cosine, at_sine = *sine;
    *cosine = (floats)vbslq_f32(is_odd, (float32x4_t)-at_sine, (float32x4_t)at_cosine);
    *sine = (floats)vbslq_f32(is_odd, (float32x4_t)at_cosine, (float32x4_t)at_sine);
}

#include "compute/zo_body.h"

#endif
