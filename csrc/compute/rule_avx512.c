/*
 * Every rule with AVX-512, and the formats of moments, sixteen elements at a time.
 *
 * Without VPCLMULQDQ, what is read goes through the crc32 instruction as in rule_avx2.c, so that
 * two units share the work, and only what is written is folded. Folding from the registers was
 * faster than from the stored bytes, by 1.12 to 1.15 on a Zen 5.
 */
#if defined(__x86_64__)

#include <immintrin.h>

#define VECTOR_BYTES 64
#define TABLE(kind) lh_rule_avx512##kind
#define HAS_NARROW_FOLDING
#define DECODE lh_adam_8bit_decode_avx512
#define ENCODE lh_adam_8bit_encode_avx512
#define DECODE_4BIT lh_adam_4bit_decode_avx512
#define ENCODE_4BIT lh_adam_4bit_encode_avx512
#define ROUND_BF16 lh_adam_round_bf16_avx512

#include "base/crc32c.h"
#include "compute/adam_kernels.h"
#include "compute/zo_vectors.h"

typedef floats values;
typedef __mmask16 flags;

static INLINE values splat(float a)
{
    return (values)_mm512_set1_ps(a);
}

static INLINE values fma_of(values a, values b, values c)
{
    return (values)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

static INLINE values root_of(values a)
{
    return (values)_mm512_sqrt_ps((__m512)a);
}

static INLINE values sign_of(values a)
{
    const __m512 minus_zero = _mm512_set1_ps(-0.0f);
    __mmask16 has_sign = _mm512_cmp_ps_mask((__m512)a, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    __m512 sign = _mm512_and_ps((__m512)a, minus_zero);

    return (values)_mm512_maskz_or_ps(has_sign, sign, _mm512_set1_ps(1));
}

static INLINE flags equal_of(words a, words b)
{
    return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b);
}

static INLINE flags nan_of(values a)
{
    return _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_UNORD_Q);
}

static INLINE values nan_where(values a, flags where)
{
    const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(LH_ADAM_NAN_BITS));

    return (values)_mm512_mask_mov_ps((__m512)a, where, nan);
}

static INLINE bool any_of(flags a)
{
    return a != 0;
}

static INLINE words lesser(words a, words b)
{
    return (words)_mm512_min_epi32((__m512i)a, (__m512i)b);
}

static INLINE words greater(words a, words b)
{
    return (words)_mm512_max_epi32((__m512i)a, (__m512i)b);
}

static INLINE uint32_t largest_of(words a)
{
    return (uint32_t)_mm512_reduce_max_epi32((__m512i)a);
}

static INLINE words signed_load(const int8_t *source)
{
    return (words)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)source));
}

static INLINE values unsigned_load(const uint8_t *source)
{
    __m128i bytes = _mm_loadu_si128((const void *)source);

    return (values)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}

static INLINE void bytes_store(uint8_t *target, words codes)
{
    _mm_storeu_si128((void *)target, _mm512_cvtepi32_epi8((__m512i)codes));
}

static INLINE words shorts_load(const int16_t *source)
{
    return (words)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const void *)source));
}

static INLINE words uppers_load(const uint16_t *source)
{
    return (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)source)) << 16;
}

static INLINE values halves_load(const uint16_t *source)
{
    return (values)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)source));
}

static INLINE words halves_of(values low, values high)
{
    __m256i halves = _mm512_cvtps_ph((__m512)high, _MM_FROUND_TO_NEAREST_INT);
    __m512i whole = _mm512_castsi256_si512(_mm512_cvtps_ph((__m512)low, _MM_FROUND_TO_NEAREST_INT));

    return (words)_mm512_inserti64x4(whole, halves, 1);
}

/* Index vectors that select the lower (first 0) or the upper (1) halves of 2 x 16 words. */
static INLINE __m512i half_indices(short first)
{
    const __m512i ramp =
        _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26,
                         24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);

    return _mm512_add_epi16(ramp, _mm512_set1_epi16(first));
}

static INLINE words lowers_of(words low, words high)
{
    return (words)_mm512_permutex2var_epi16((__m512i)low, half_indices(0), (__m512i)high);
}

static INLINE words uppers_of(words low, words high)
{
    return (words)_mm512_permutex2var_epi16((__m512i)low, half_indices(1), (__m512i)high);
}

/*
 * x^544 and x^480 modulo the CRC-32C polynomial, reflected and shifted by one: multiplying the low
 * and the high half of a 16-byte lane by them advances the lane by 512 bits.
 */
#define WIDE_LOW UINT64_C(0x740EEF02)
#define WIDE_HIGH UINT64_C(0x9E4ADDF8)
/* x^288 and x^224: the same for 256 bits. */
#define NARROW_LOW UINT64_C(0x1384AA63A)
#define NARROW_HIGH UINT64_C(0xBA4FC28E)
#define READS_ARE_FOLDED(folding) ((folding) == LH_ADAM_FOLDING_WIDE)

/* One of both; narrow: two accumulators. */
struct sum {
    __m512i wide;
    __m128i narrow[2];
};

/*
 * PCLMULQDQ in its VEX encoding, to which the constraint x limits the registers. From an intrinsic,
 * the compiler could emit the EVEX encoding, which is a part of VPCLMULQDQ.
 */
#define NARROW_PRODUCT(out, left, right, halves)                                                   \
    __asm__("vpclmulqdq $" halves ", %2, %1, %0" : "=x"(out) : "x"(left), "x"(right))

static INLINE void narrow_fold(__m128i *state, __m128i word)
{
    const __m128i constants = _mm_set_epi64x(NARROW_HIGH, NARROW_LOW);
    __m128i low, high;

    NARROW_PRODUCT(low, *state, constants, "0x00");
    NARROW_PRODUCT(high, *state, constants, "0x11");
    *state = _mm_ternarylogic_epi64(low, high, word, 0x96);
}

static INLINE void fold(struct sum *sum, words added, const enum lh_adam_folding folding)
{
    const __m512i constants = _mm512_set4_epi64(WIDE_HIGH, WIDE_LOW, WIDE_HIGH, WIDE_LOW);
    const __m512i word = (__m512i)added;

    if (folding == LH_ADAM_FOLDING_WIDE) {
        __m512i low = _mm512_clmulepi64_epi128(sum->wide, constants, 0x00);
        __m512i high = _mm512_clmulepi64_epi128(sum->wide, constants, 0x11);

        sum->wide = _mm512_ternarylogic_epi64(low, high, word, 0x96);
        return;
    }
    narrow_fold(sum->narrow + 0, _mm512_castsi512_si128(word));
    narrow_fold(sum->narrow + 1, _mm512_extracti32x4_epi32(word, 1));
    narrow_fold(sum->narrow + 0, _mm512_extracti32x4_epi32(word, 2));
    narrow_fold(sum->narrow + 1, _mm512_extracti32x4_epi32(word, 3));
}

static INLINE uint64_t word_crc(uint64_t crc, uint64_t word)
{
    return _mm_crc32_u64(crc, word);
}

static uint32_t sum_crc(const struct sum *sum, const enum lh_adam_folding folding)
{
    if (folding == LH_ADAM_FOLDING_WIDE)
        return lh_crc32c(UINT32_MAX, &sum->wide, sizeof(sum->wide));
    return lh_crc32c(UINT32_MAX, sum->narrow, sizeof(sum->narrow));
}

#include "compute/rule_body.h"
#include "compute/moments_body.h"

#endif
