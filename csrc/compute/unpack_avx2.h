/* What the files of lh_unpack()'s kernels with AVX2 and F16C share; only they include this. */
#ifndef LH_COMPUTE_UNPACK_AVX2_H
#define LH_COMPUTE_UNPACK_AVX2_H

#include <immintrin.h>

#include "compute/unpack_kernels.h"

/* unpack_orders_avx2.c: see struct lh_unpack_kernel. */
void lh_unpack_tile_avx2(const struct lh_unpack *unpack, const uint8_t *group, uint64_t row,
                         uint64_t column, uint8_t *bits);
void lh_unpack_any_integers_avx2(const struct lh_unpack *unpack, const uint8_t *bits, float zero,
                                 float scale, uint64_t count, void *out);
void lh_unpack_tables_avx2(const struct lh_unpack *unpack, const float *scales,
                           const uint8_t *zeros, struct lh_unpack_table *tables);
void lh_unpack_looked_up_avx2(const struct lh_unpack *unpack, const uint8_t *group, uint64_t row,
                              uint64_t rows, uint64_t column,
                              const struct lh_unpack_table *const *tables, uint16_t *out);
void lh_unpack_stored_avx2(void);
void lh_unpack_scaled_avx2(const struct lh_unpack *unpack, const uint8_t *bits, const float *scales,
                           uint64_t count, void *out);
void lh_unpack_powers_avx2(const struct lh_unpack *unpack, const uint8_t *group, uint64_t row,
                           uint64_t rows, uint64_t column, const uint8_t *scales, uint16_t *out);

/* unpack_indexed_avx2.c */
void lh_unpack_indexed_avx2(const struct lh_unpack *unpack, const uint8_t *packed, uint64_t columns,
                            const struct lh_unpack_indexed *all, uint8_t *out, uint64_t out_stride);
void lh_unpack_integers_avx2(const struct lh_unpack *unpack, const uint8_t *bits, float zero,
                             float scale, uint64_t count, void *out);
/* unpack_indexed_avx512.c: needs AVX-512 as well. */
void lh_unpack_indexed_avx512(const struct lh_unpack *unpack, const uint8_t *packed,
                              uint64_t columns, const struct lh_unpack_indexed *all, uint8_t *out,
                              uint64_t out_stride);
void lh_unpack_integers_avx512(const struct lh_unpack *unpack, const uint8_t *bits, float zero,
                               float scale, uint64_t count, void *out);
/* unpack_grains_avx512.c: needs AVX-512 as well. */
uint64_t lh_unpack_grains_avx512(const struct lh_unpack *unpack, const uint8_t *packed,
                                 uint64_t count, void *out);
/* unpack_avx2.c */
void lh_unpack_bytes_avx2(const struct lh_unpack *unpack, const uint8_t *packed, float scale,
                          uint64_t count, void *out);
void lh_unpack_nibbles_avx2(const struct lh_unpack *unpack, const uint8_t *packed,
                            const float *table, const float *scales, uint64_t blocks,
                            uint16_t *out);
uint64_t lh_unpack_e2m1_avx2(const struct lh_unpack *unpack, const uint8_t *packed,
                             const uint8_t *scales, float factor, uint64_t batches, void *out);
uint64_t lh_unpack_grains_avx2(const struct lh_unpack *unpack, const uint8_t *packed,
                               uint64_t count, void *out);

/* Whether a number of fp16 is finite. */
static inline bool half_is_finite(uint16_t half)
{
    return (half & 0x7C00) != 0x7C00;
}

/* Every NaN becomes the positive quiet one. */
static inline __m256 settled(__m256 value)
{
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
    return _mm256_blendv_ps(value, nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
}

/* Exchange rows and columns of 8 x 8 words. */
static inline void words_exchange(__m256i *v)
{
    __m256i a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
        v[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
    }
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

/* Round to `rounding`. */
static inline __m256 rounded(__m256 value, uint32_t rounding)
{
    if (rounding == LH_DTYPE_BF16)
        return _mm256_castsi256_ps(_mm256_slli_epi32(bf16_rounded(value), 16));
    return rounding == LH_DTYPE_F16 ? _mm256_cvtph_ps(half_rounded(value)) : value;
}

/* Scale, and round to `rounding`. */
static inline __m256 product(__m256 value, __m256 scale, uint32_t rounding)
{
    return rounded(settled(_mm256_mul_ps(value, scale)), rounding);
}

static inline __m128i narrowed(__m256 value, uint32_t dtype)
{
    if (dtype == LH_DTYPE_F16)
        return half_rounded(value);
    __m256i bits = bf16_rounded(value);
    return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}

/* The tables of shuffles that look the low and the high bytes of 16 values up. */
static inline void bytes_split(__m128i first, __m128i second, __m256i *lows, __m256i *highs)
{
    const __m128i low_bits = _mm_set1_epi16(0xFF);
    *lows = _mm256_broadcastsi128_si256(
        _mm_packus_epi16(_mm_and_si128(first, low_bits), _mm_and_si128(second, low_bits)));
    *highs = _mm256_broadcastsi128_si256(
        _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8)));
}

/* Store the 16-bit values of 32 codes, of whose values the tables hold the low and high bytes. */
static inline void looked_up_put(__m256i codes, __m256i lows, __m256i highs, uint16_t *out)
{
    codes = _mm256_permute4x64_epi64(codes, 0xD8);
    __m256i low = _mm256_shuffle_epi8(lows, codes);
    __m256i high = _mm256_shuffle_epi8(highs, codes);
    _mm256_storeu_si256((void *)out, _mm256_unpacklo_epi8(low, high));
    _mm256_storeu_si256((void *)(out + 16), _mm256_unpackhi_epi8(low, high));
}

#endif
