/*
 * Every rule with AVX2 and FMA, and the formats of moments, eight elements at a time.
 *
 * What is written is folded in registers ([Note: folds] in adam_kernels.h); what is read goes
 * through the crc32 instruction. With seven carry-less chains, the products alone took a Zen 4 core
 * longer than memory (0.76 of its bandwidth for AdamW and bf16), so only four streams are folded,
 * and integer units that were idle handle the rest (0.88). The crc32 instruction is unsuitable for
 * what is written: its 8-byte loads would wait for the 32-byte stores (0.50).
 */
#if defined(__x86_64__)

#include <immintrin.h>

#define VECTOR_BYTES 32
#define TABLE(kind) lh_rule_avx2##kind
#define HAS_NARROW_FOLDING
#define DECODE lh_adam_8bit_decode_avx2
#define ENCODE lh_adam_8bit_encode_avx2
#define DECODE_4BIT lh_adam_4bit_decode_avx2
#define ENCODE_4BIT lh_adam_4bit_encode_avx2
#define ROUND_BF16 lh_adam_round_bf16_avx2

#include "base/crc32c.h"
#include "compute/adam_kernels.h"
#include "compute/zo_vectors.h"

typedef floats values;
typedef words flags; /* all bits of a lane are set, or none */

static INLINE values splat(float a)
{
    return (values)_mm256_set1_ps(a);
}

static INLINE values fma_of(values a, values b, values c)
{
    return (values)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

static INLINE values root_of(values a)
{
    return (values)_mm256_sqrt_ps((__m256)a);
}

static INLINE values sign_of(values a)
{
    words above = (words)(a > 0), below = (words)(a < 0);
    words one = (words)splat(1), minus = (words)splat(-1);

    return (values)((above & one) | (below & minus));
}

static INLINE flags equal_of(words a, words b)
{
    return (flags)(a == b);
}

static INLINE flags nan_of(values a)
{
    return (flags)_mm256_cmp_ps((__m256)a, (__m256)a, _CMP_UNORD_Q);
}

static INLINE values nan_where(values a, flags where)
{
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(LH_ADAM_NAN_BITS));

    return (values)_mm256_blendv_ps((__m256)a, nan, (__m256)where);
}

static INLINE bool any_of(flags a)
{
    return _mm256_movemask_ps((__m256)a) != 0;
}

static INLINE words lesser(words a, words b)
{
    return (words)_mm256_min_epi32((__m256i)a, (__m256i)b);
}

static INLINE words greater(words a, words b)
{
    return (words)_mm256_max_epi32((__m256i)a, (__m256i)b);
}

static INLINE uint32_t largest_of(words a)
{
    __m256i whole = (__m256i)a;
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));

    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4E));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xB1));
    return (uint32_t)_mm_cvtsi128_si32(most);
}

static INLINE words signed_load(const int8_t *source)
{
    return (words)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)source));
}

static INLINE values unsigned_load(const uint8_t *source)
{
    __m128i bytes = _mm_loadl_epi64((const void *)source);

    return (values)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
}

static INLINE void bytes_store(uint8_t *target, words codes)
{
    const __m256i low_bytes = _mm256_set1_epi32(0x0C080400);
    __m256i packed = _mm256_shuffle_epi8((__m256i)codes, low_bytes);
    __m128i low = _mm256_castsi256_si128(packed), high = _mm256_extracti128_si256(packed, 1);

    _mm_storel_epi64((void *)target, _mm_unpacklo_epi32(low, high));
}

static INLINE words shorts_load(const int16_t *source)
{
    return (words)_mm256_cvtepi16_epi32(_mm_loadu_si128((const void *)source));
}

static INLINE words uppers_load(const uint16_t *source)
{
    return (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)source)) << 16;
}

static INLINE values halves_load(const uint16_t *source)
{
    return (values)_mm256_cvtph_ps(_mm_loadu_si128((const void *)source));
}

static INLINE words halves_of(values low, values high)
{
    return (words)_mm256_set_m128i(_mm256_cvtps_ph((__m256)high, _MM_FROUND_TO_NEAREST_INT),
                                   _mm256_cvtps_ph((__m256)low, _MM_FROUND_TO_NEAREST_INT));
}

/* The lower halves of words whose upper halves are 0, in order. */
static INLINE words packed_of(words low, words high)
{
    __m256i packed = _mm256_packus_epi32((__m256i)low, (__m256i)high);

    return (words)_mm256_permute4x64_epi64(packed, 0xD8);
}

static INLINE words lowers_of(words low, words high)
{
    return packed_of(low & 0xFFFF, high & 0xFFFF);
}

static INLINE words uppers_of(words low, words high)
{
    return packed_of(low >> 16, high >> 16);
}

/* x^288 and x^224 modulo the CRC-32C polynomial: as in rule_avx512.c, but advancing 256 bits. */
#define FOLD_LOW UINT64_C(0x1384AA63A)
#define FOLD_HIGH UINT64_C(0xBA4FC28E)
#define READS_ARE_FOLDED(folding) false

/* 256 bits in either form. */
struct sum {
    __m256i wide;
    __m128i narrow[2];
};

static INLINE void narrow_fold(__m128i *state, __m128i word)
{
    const __m128i constants = _mm_set_epi64x(FOLD_HIGH, FOLD_LOW);
    __m128i low = _mm_clmulepi64_si128(*state, constants, 0x00);
    __m128i high = _mm_clmulepi64_si128(*state, constants, 0x11);

    *state = _mm_xor_si128(_mm_xor_si128(low, high), word);
}

static INLINE void fold(struct sum *sum, words added, const enum lh_adam_folding folding)
{
    const __m256i constants = _mm256_set_epi64x(FOLD_HIGH, FOLD_LOW, FOLD_HIGH, FOLD_LOW);
    const __m256i word = (__m256i)added;

    if (folding == LH_ADAM_FOLDING_WIDE) {
        __m256i low = _mm256_clmulepi64_epi128(sum->wide, constants, 0x00);
        __m256i high = _mm256_clmulepi64_epi128(sum->wide, constants, 0x11);

        sum->wide = _mm256_xor_si256(_mm256_xor_si256(low, high), word);
        return;
    }
    narrow_fold(sum->narrow + 0, _mm256_castsi256_si128(word));
    narrow_fold(sum->narrow + 1, _mm256_extracti128_si256(word, 1));
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

#include "compute/moments_body.h"
#include "compute/rule_body.h"

#endif
