/* Decode quantized tensors with AVX2 and F16C, eight elements at a time in fp32. */
#if defined(__x86_64__)

#include <immintrin.h>

#include "compute/unpack_kernels.h"

/* Every NaN becomes the positive quiet one. */
static inline __m256 settled(__m256 value)
{
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
    return _mm256_blendv_ps(value, nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
}

/* Round to bf16, in the low half of each lane; a settled NaN stays one. */
static inline __m256i bf16_rounded(__m256 value)
{
    __m256i bits = _mm256_castps_si256(value);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    return _mm256_srli_epi32(nearest, 16);
}

static inline __m128i half_rounded(__m256 value)
{
    return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
}

/* Scale, and round to `rounding`. */
static inline __m256 product(__m256 value, __m256 scale, uint32_t rounding)
{
    value = settled(_mm256_mul_ps(value, scale));
    if (rounding == LH_DTYPE_BF16)
        return _mm256_castsi256_ps(_mm256_slli_epi32(bf16_rounded(value), 16));
    return rounding == LH_DTYPE_F16 ? _mm256_cvtph_ps(half_rounded(value)) : value;
}

static inline __m128i narrowed(__m256 value, uint32_t dtype)
{
    if (dtype == LH_DTYPE_F16)
        return half_rounded(value);
    __m256i bits = bf16_rounded(value);
    return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}

/* E4M3 widened to a half has the value times 2^-8; the half of a byte with the NaN's bits is 480.
 */
static inline __m256 e4m3_values(__m128i bytes)
{
    __m128i wide = _mm_cvtepi8_epi16(bytes);
    __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7F));
    __m128i sign = _mm_and_si128(wide, _mm_set1_epi16((int16_t)0x8000));
    __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7), sign);
    __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(0x1p8f));
    __m256i is_nan = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7F)));
    return _mm256_or_ps(value, _mm256_castsi256_ps(is_nan)); /* all bits set: a NaN */
}

static inline __attribute__((always_inline)) void bytes_unpack(const uint8_t *packed, float scale,
                                                               uint64_t count, void *out,
                                                               bool is_integer, uint32_t rounding,
                                                               uint32_t dtype)
{
    const __m256 factor = _mm256_set1_ps(scale);
    float *wide = out;
    uint16_t *narrow = out;
    for (uint64_t i = 0; i < count; i += 8) {
        __m128i bytes = _mm_loadl_epi64((const void *)(packed + i));
        __m256 value =
            is_integer ? _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)) : e4m3_values(bytes);
        value = product(value, factor, rounding);
        if (dtype == LH_DTYPE_F32)
            _mm256_storeu_ps(wide + i, value);
        else
            _mm_storeu_si128((void *)(narrow + i), narrowed(value, dtype));
    }
}

static void bytes(const struct lh_unpack *unpack, const uint8_t *packed, float scale,
                  uint64_t count, void *out)
{
    bool is_integer = unpack->format == LH_UNPACK_FORMAT_I8;
    /* Rounding to bf16 twice is rounding to bf16 once. */
    bool is_plain = unpack->rounding == LH_DTYPE_F32 || unpack->rounding == LH_DTYPE_BF16;
    if (unpack->dtype == LH_DTYPE_BF16 && is_plain && is_integer)
        bytes_unpack(packed, scale, count, out, true, LH_DTYPE_F32, LH_DTYPE_BF16);
    else if (unpack->dtype == LH_DTYPE_BF16 && is_plain)
        bytes_unpack(packed, scale, count, out, false, LH_DTYPE_F32, LH_DTYPE_BF16);
    else
        bytes_unpack(packed, scale, count, out, is_integer, unpack->rounding, unpack->dtype);
}

/*
 * The 16 products are rounded once, and then looked up: a table of their low bytes and one of their
 * high bytes.
 */
static void nibbles(const struct lh_unpack *unpack, const uint8_t *packed, const float *table,
                    float scale, uint64_t count, uint16_t *out)
{
    const __m256 factor = _mm256_set1_ps(scale);
    const __m128i low_bits = _mm_set1_epi16(0xFF), low_nibbles = _mm_set1_epi8(15);
    const uint32_t rounding = unpack->rounding, dtype = unpack->dtype;
    __m128i first = narrowed(product(_mm256_loadu_ps(table), factor, rounding), dtype);
    __m128i second = narrowed(product(_mm256_loadu_ps(table + 8), factor, rounding), dtype);
    __m128i lows =
        _mm_packus_epi16(_mm_and_si128(first, low_bits), _mm_and_si128(second, low_bits));
    __m128i highs = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
    for (uint64_t i = 0; i < count; i += 32) {
        __m128i pairs = _mm_loadu_si128((const void *)(packed + i / 2));
        __m128i even = _mm_and_si128(_mm_srli_epi16(pairs, 4), low_nibbles);
        __m128i odd = _mm_and_si128(pairs, low_nibbles);
        __m128i codes[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
        for (uint64_t j = 0; j < 2; j++) {
            __m128i low = _mm_shuffle_epi8(lows, codes[j]);
            __m128i high = _mm_shuffle_epi8(highs, codes[j]);
            __m128i *to = (void *)(out + i + 16 * j);
            _mm_storeu_si128(to, _mm_unpacklo_epi8(low, high));
            _mm_storeu_si128(to + 1, _mm_unpackhi_epi8(low, high));
        }
    }
}

const struct lh_unpack_kernel lh_unpack_avx2 = {.bytes = bytes, .nibbles = nibbles};

#endif
