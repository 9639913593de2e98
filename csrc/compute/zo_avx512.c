/* Generate z with AVX-512, sixteen elements at a time. */
#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>

#define VECTOR_BYTES 64
#define KERNEL lh_zo_avx512
#define WORDS lh_zo_words_avx512
#define REGISTER "+v"
#define LANE_COUNTERS 0, 1, 4, 5, 8, 9, 12, 13
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
    return (longs)_mm512_mul_epu32((__m512i)left, (__m512i)right);
}

/* The exclusive or of three vectors, by a single instruction. */
static INLINE longs xor3(longs late, longs early, longs constant)
{
    return (longs)_mm512_ternarylogic_epi64((__m512i)late, (__m512i)early, (__m512i)constant, 0x96);
}

static INLINE words lowers_of(longs a, longs b)
{
    return (words)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x88);
}

static INLINE words uppers_of(longs a, longs b)
{
    return (words)_mm512_shuffle_ps((__m512)a, (__m512)b, 0xDD);
}

static INLINE floats root(floats value)
{
    return _mm512_sqrt_ps(value);
}

static INLINE void turn_quarter(words quarter, floats *cosine, floats *sine)
{
    const __m512i odd = _mm512_set1_epi32(1 << 30);
    __mmask16 is_odd = _mm512_test_epi32_mask((__m512i)quarter, odd);
    floats at_sine = _mm512_mask_blend_ps(is_odd, *sine, *cosine);
    *cosine = _mm512_mask_xor_ps(*cosine, is_odd, *sine, _mm512_set1_ps(-0.0F));
    *sine = at_sine;
}

#include "compute/zo_body.h"

#endif
