/* Generate z with AVX2, eight elements at a time. */
#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>

#define VECTOR_BYTES 32
#define KERNEL lh_zo_avx2
#define WORDS lh_zo_words_avx2
#define REGISTER "+x"
#define LANE_COUNTERS 0, 1, 4, 5
#define CONSTANT_VECTORS
#define CHAINS 2
#define CHAIN_DELAY 3
#define ROUND_TIME 4
#define ROUND_9_DELAY 4
#define PAIR_TIME 26
#define RADIUS_TIME 2
#define TURN_DELAY 0
#define TURN_TIME 5
#define END_DELAY 2

#include "compute/zo_vectors.h"

static INLINE longs multiply32(longs left, longs right)
{
    return (longs)_mm256_mul_epu32((__m256i)left, (__m256i)right);
}

static INLINE longs xor3(longs late, longs early, longs constant)
{
    early ^= constant;
    PIN(early);
    return late ^ early;
}

static INLINE words lowers_of(longs a, longs b)
{
    return (words)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x88);
}

static INLINE words uppers_of(longs a, longs b)
{
    return (words)_mm256_shuffle_ps((__m256)a, (__m256)b, 0xDD);
}

static INLINE floats root(floats value)
{
    return _mm256_sqrt_ps(value);
}

static INLINE void turn_quarter(words quarter, floats *cosine, floats *sine)
{
    floats is_odd = (floats)(quarter << 1);
    floats minus_sine = _mm256_xor_ps(*sine, _mm256_set1_ps(-0.0F));
    *sine = _mm256_blendv_ps(*sine, *cosine, is_odd);
    *cosine = _mm256_blendv_ps(*cosine, minus_sine, is_odd);
}

#include "compute/zo_body.h"

#endif
