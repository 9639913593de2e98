/* Decode quantized tensors with AVX2 and F16C, eight elements at a time in fp32. */
#if defined(__x86_64__)

#include <math.h>
#include <string.h>

#include "compute/unpack_avx2.h"

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

/* Eight elements of a format of which each begins at a byte. */
static inline __attribute__((always_inline)) __m256 eight_values(const uint8_t *packed,
                                                                 uint32_t format)
{
    switch (format) {
    case LH_UNPACK_FORMAT_I8:
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)packed)));
    case LH_UNPACK_FORMAT_F32:
        return _mm256_loadu_ps((const void *)packed);
    case LH_UNPACK_FORMAT_F16:
        return _mm256_cvtph_ps(_mm_loadu_si128((const void *)packed));
    case LH_UNPACK_FORMAT_BF16:
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)packed)), 16));
    default:
        return e4m3_values(_mm_loadl_epi64((const void *)packed));
    }
}

static inline __attribute__((always_inline)) void bytes_unpack(const uint8_t *packed, float scale,
                                                               uint64_t count, void *out,
                                                               uint32_t format, uint32_t rounding,
                                                               uint32_t dtype)
{
    const __m256 factor = _mm256_set1_ps(scale);
    const bool is_float = format == LH_UNPACK_FORMAT_BF16 || format == LH_UNPACK_FORMAT_F16;
    const uint64_t step = format == LH_UNPACK_FORMAT_F32 ? 4 : is_float ? 2 : 1;
    float *wide = out;
    uint16_t *narrow = out;
    for (uint64_t i = 0; i < count; i += 8) {
        __m256 value = product(eight_values(packed + i * step, format), factor, rounding);
        if (dtype == LH_DTYPE_F32)
            _mm256_storeu_ps(wide + i, value);
        else
            _mm_storeu_si128((void *)(narrow + i), narrowed(value, dtype));
    }
}

/* Store 16 values, which are not NaNs. */
static inline __attribute__((always_inline)) void
sixteen_put(__m256 first, __m256 second, uint32_t dtype, void *out, uint64_t at)
{
    if (dtype == LH_DTYPE_F32) {
        _mm256_storeu_ps((float *)out + at, first);
        _mm256_storeu_ps((float *)out + at + 8, second);
        return;
    }
    __m256i narrow;
    if (dtype == LH_DTYPE_F16)
        narrow = _mm256_set_m128i(half_rounded(second), half_rounded(first));
    else
        narrow = _mm256_permute4x64_epi64(
            _mm256_packus_epi32(bf16_rounded(first), bf16_rounded(second)), 0xD8);
    _mm256_storeu_si256((void *)((uint16_t *)out + at), narrow);
}

/*
 * Decode E4M3 with a scale below 2^119, in steps of 32 elements up to one with a NaN. Returns how
 * many elements are decoded. No product is a NaN, and 2^8 may be a factor of the scale: see
 * e4m3_values().
 */
static uint64_t numbers_unpack(const uint8_t *packed, float scale, uint64_t count, void *out,
                               uint32_t dtype)
{
    const __m256 factor = _mm256_set1_ps(scale * 0x1p8f);
    const __m256i most = _mm256_set1_epi8(0x7F), mask = _mm256_set1_epi16((int16_t)0xBFFF);
    for (uint64_t i = 0; i < count; i += 32) {
        __m256i bytes = _mm256_loadu_si256((const void *)(packed + i));
        if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, most), most)) != 0)
            return i;
        __m128i parts[2] = {_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)};
        for (uint64_t j = 0; j < 2; j++) {
            __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(parts[j]), 7);
            half = _mm256_and_si256(half, mask); /* the sign is in two bits */
            __m256 first = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
            __m256 second = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
            sixteen_put(_mm256_mul_ps(first, factor), _mm256_mul_ps(second, factor), dtype, out,
                        i + 16 * j);
        }
    }
    return count;
}

/*
 * The same to bf16, with a scale of at least 2^-100. An element has 3 bits of mantissa, so
 * the products of the 8 mantissas (and of the 8 values below 2^-6) are rounded once and looked up;
 * the exponent is then added to a product's own, which neither overflows nor becomes denormal.
 */
static uint64_t mantissas_unpack(const uint8_t *packed, float scale, uint64_t count, uint16_t *out)
{
    const __m256i most = _mm256_set1_epi8(0x7F), seven = _mm256_set1_epi8(7);
    const __m256i exponents = _mm256_set1_epi16(0x7800);
    const __m256i signs = _mm256_set1_epi16((int16_t)0x8000), zero = _mm256_setzero_si256();
    const __m256 steps = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 small = _mm256_mul_ps(steps, _mm256_set1_ps(scale * 0x1p-9f));
    const __m256 large =
        _mm256_mul_ps(_mm256_add_ps(steps, _mm256_set1_ps(8)), _mm256_set1_ps(scale * 0x1p-10f));
    __m256i lows, highs;
    bytes_split(narrowed(small, LH_DTYPE_BF16), narrowed(large, LH_DTYPE_BF16), &lows, &highs);
    for (uint64_t i = 0; i < count; i += 32) {
        __m256i bytes = _mm256_loadu_si256((const void *)(packed + i));
        __m256i magnitude = _mm256_and_si256(bytes, most);
        if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(magnitude, most)) != 0)
            return i;
        bytes = _mm256_permute4x64_epi64(bytes, 0xD8);
        magnitude = _mm256_and_si256(bytes, most);
        __m256i is_large =
            _mm256_and_si256(_mm256_cmpgt_epi8(magnitude, seven), _mm256_set1_epi8(8));
        __m256i codes = _mm256_or_si256(_mm256_and_si256(bytes, seven), is_large);
        __m256i low = _mm256_shuffle_epi8(lows, codes), high = _mm256_shuffle_epi8(highs, codes);
        __m256i products[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
        __m256i words[2] = {_mm256_unpacklo_epi8(zero, bytes), _mm256_unpackhi_epi8(zero, bytes)};
        for (int j = 0; j < 2; j++) {
            __m256i exponent = _mm256_srli_epi16(_mm256_and_si256(words[j], exponents), 4);
            __m256i sum = _mm256_add_epi16(products[j], exponent);
            _mm256_storeu_si256((void *)(out + i + 16 * (uint64_t)j),
                                _mm256_xor_si256(sum, _mm256_and_si256(words[j], signs)));
        }
    }
    return count;
}

/* The same for a result of any dtype; 0 if the scale or the rounding do not allow it. */
static uint64_t numbers(const struct lh_unpack *unpack, const uint8_t *packed, float scale,
                        uint64_t count, void *out)
{
    const float magnitude = fabsf(scale);
    bool is_once = unpack->rounding == LH_DTYPE_F32 || unpack->rounding == unpack->dtype;
    if (unpack->format != LH_UNPACK_FORMAT_F8_E4M3 || !is_once || !(magnitude < 0x1p119f))
        return 0;
    if (unpack->dtype == LH_DTYPE_BF16 && magnitude >= 0x1p-100f)
        return mantissas_unpack(packed, scale, count, out);
    return numbers_unpack(packed, scale, count, out, unpack->dtype);
}

static void bytes_any(const struct lh_unpack *unpack, const uint8_t *packed, float scale,
                      uint64_t count, void *out)
{
    /* Rounding to bf16 twice is rounding to bf16 once. */
    bool is_plain = unpack->rounding == LH_DTYPE_F32 || unpack->rounding == LH_DTYPE_BF16;
    uint32_t format = unpack->dtype == LH_DTYPE_BF16 && is_plain ? unpack->format : UINT32_MAX;
    if (format == LH_UNPACK_FORMAT_I8)
        bytes_unpack(packed, scale, count, out, LH_UNPACK_FORMAT_I8, LH_DTYPE_F32, LH_DTYPE_BF16);
    else if (format == LH_UNPACK_FORMAT_F8_E4M3)
        bytes_unpack(packed, scale, count, out, LH_UNPACK_FORMAT_F8_E4M3, LH_DTYPE_F32,
                     LH_DTYPE_BF16);
    else if (format == LH_UNPACK_FORMAT_F16)
        bytes_unpack(packed, scale, count, out, LH_UNPACK_FORMAT_F16, LH_DTYPE_F32, LH_DTYPE_BF16);
    else
        bytes_unpack(packed, scale, count, out, unpack->format, unpack->rounding, unpack->dtype);
}

void lh_unpack_bytes_avx2(const struct lh_unpack *unpack, const uint8_t *packed, float scale,
                          uint64_t count, void *out)
{
    uint8_t *to = out;
    for (uint64_t done = 0; done < count;) {
        void *at = to + done * lh_unpack_element_bytes(unpack);
        uint64_t more = numbers(unpack, packed + done, scale, count - done, at);
        if (more == 0) {
            more = unpack->format == LH_UNPACK_FORMAT_F8_E4M3 ? LH_UNPACK_BATCH : count;
            bytes_any(unpack, packed + done, scale, more, at);
        }
        done += more;
    }
}

/* A block's 16 products are rounded once, and then looked up. */
static inline __attribute__((always_inline)) void
nibbles_unpack(const uint8_t *packed, const float *table, const float *scales, uint64_t blocks,
               uint64_t block, uint16_t *out, uint32_t rounding, uint32_t dtype)
{
    const __m256 values[2] = {_mm256_loadu_ps(table), _mm256_loadu_ps(table + 8)};
    const __m256i low_nibbles = _mm256_set1_epi8(15);
    for (uint64_t b = 0; b < blocks; b++) {
        const __m256 factor = _mm256_set1_ps(scales[b]);
        __m128i first = narrowed(product(values[0], factor, rounding), dtype);
        __m128i second = narrowed(product(values[1], factor, rounding), dtype);
        __m256i lows, highs;
        bytes_split(first, second, &lows, &highs);
        for (uint64_t i = 0; i < block; i += 32, packed += 16, out += 32) {
            __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)packed));
            __m256i codes =
                _mm256_or_si256(_mm256_srli_epi16(pairs, 4), _mm256_slli_epi16(pairs, 8));
            looked_up_put(_mm256_and_si256(codes, low_nibbles), lows, highs, out);
        }
    }
}

void lh_unpack_nibbles_avx2(const struct lh_unpack *unpack, const uint8_t *packed,
                            const float *table, const float *scales, uint64_t blocks, uint16_t *out)
{
    const uint64_t block = unpack->block_columns;
    /* Rounding to bf16 twice is rounding to bf16 once. */
    if (unpack->dtype == LH_DTYPE_BF16 && unpack->rounding != LH_DTYPE_F16)
        nibbles_unpack(packed, table, scales, blocks, block, out, LH_DTYPE_F32, LH_DTYPE_BF16);
    else
        nibbles_unpack(packed, table, scales, blocks, block, out, unpack->rounding, unpack->dtype);
}

/* Eight scales of E8M0. */
static inline __m256 e8m0_scales(const uint8_t *scales)
{
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)scales));
    __m256i least = _mm256_set1_epi32(0x00400000);
    __m256i is_least = _mm256_cmpeq_epi32(wide, _mm256_setzero_si256());
    return _mm256_castsi256_ps(_mm256_blendv_epi8(_mm256_slli_epi32(wide, 23), least, is_least));
}

static inline __m256 scales_by(const struct lh_unpack *unpack, const uint8_t *scales, float factor)
{
    if (unpack->scale_type == LH_UNPACK_SCALE_E8M0)
        return e8m0_scales(scales);
    __m256 values = e4m3_values(_mm_loadl_epi64((const void *)scales));
    if (unpack->scale_type == LH_UNPACK_SCALE_E4M3_TIMES)
        return _mm256_mul_ps(values, _mm256_set1_ps(factor));
    return _mm256_div_ps(values, _mm256_set1_ps(factor));
}

/* The products of the eight magnitudes of E2M1 and a finite scale, rounded to `rounding`. */
static inline __m256 e2m1_products(float scale, uint32_t rounding)
{
    const __m256 magnitudes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    return product(magnitudes, _mm256_set1_ps(scale), rounding);
}

/* 16 codes from 8 bytes, in each half. */
static inline __m256i e2m1_codes(const uint8_t *packed)
{
    const __m128i low_nibbles = _mm_set1_epi8(15);
    __m128i pairs = _mm_loadu_si128((const void *)packed);
    __m128i even = _mm_and_si128(pairs, low_nibbles);
    __m128i odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), low_nibbles);
    return _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
}

/*
 * Decode 32 elements, of which each half has its own products, to 16 bits: look up the low bytes
 * and the high bytes of the rounded products, and change the sign.
 */
static inline __attribute__((always_inline)) void
e2m1_narrow(const uint8_t *packed, __m256 first, __m256 second, uint32_t dtype, uint16_t *out)
{
    const __m256i split = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    __m256i codes = e2m1_codes(packed);
    __m256i table = _mm256_set_m128i(narrowed(second, dtype), narrowed(first, dtype));
    table = _mm256_shuffle_epi8(table, split);
    __m256i index = _mm256_and_si256(codes, _mm256_set1_epi8(7));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(codes, _mm256_set1_epi8(8)), 4);
    __m256i low = _mm256_shuffle_epi8(table, index);
    __m256i high = _mm256_shuffle_epi8(table, _mm256_or_si256(index, _mm256_set1_epi8(8)));
    high = _mm256_xor_si256(high, sign);
    __m256i begin = _mm256_unpacklo_epi8(low, high);
    __m256i end = _mm256_unpackhi_epi8(low, high);
    _mm256_storeu_si256((void *)out, _mm256_permute2x128_si256(begin, end, 0x20));
    _mm256_storeu_si256((void *)(out + 16), _mm256_permute2x128_si256(begin, end, 0x31));
}

/* The same to fp32. */
static inline void e2m1_wide(const uint8_t *packed, __m256 first, __m256 second, float *out)
{
    __m256i codes = e2m1_codes(packed);
    for (int i = 0; i < 4; i++) {
        __m128i half = i < 2 ? _mm256_castsi256_si128(codes) : _mm256_extracti128_si256(codes, 1);
        __m256i code = _mm256_cvtepu8_epi32(i % 2 == 0 ? half : _mm_srli_si128(half, 8));
        __m256 value = _mm256_permutevar8x32_ps(i < 2 ? first : second, code);
        __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(8)), 28);
        _mm256_storeu_ps(out + 8 * i, _mm256_xor_ps(value, _mm256_castsi256_ps(sign)));
    }
}

static inline __attribute__((always_inline)) uint64_t
e2m1_unpack(const struct lh_unpack *unpack, const uint8_t *packed, const uint8_t *scales,
            float factor, uint64_t batches, void *out, uint32_t rounding, uint32_t dtype)
{
    const __m256 infinite = _mm256_set1_ps(__builtin_inff());
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    const uint64_t steps = unpack->block_columns == 16 ? 4 : 8;
    float *wide = out;
    uint16_t *narrow = out;
    for (uint64_t i = 0; i < batches; i++) {
        float values[LH_UNPACK_SCALE_BATCH];
        __m256 eight = scales_by(unpack, scales + i * LH_UNPACK_SCALE_BATCH, factor);
        _mm256_storeu_ps(values, eight);
        __m256 is_finite = _mm256_cmp_ps(_mm256_and_ps(eight, magnitude), infinite, _CMP_LT_OQ);
        if (_mm256_movemask_ps(is_finite) != 0xFF)
            return i;
        for (uint64_t j = 0; j < steps; j++) {
            uint64_t at = i * steps + j; /* in steps of 32 elements */
            __m256 first = e2m1_products(values[steps == 4 ? 2 * j : j], rounding);
            __m256 second = steps == 4 ? e2m1_products(values[2 * j + 1], rounding) : first;
            if (dtype == LH_DTYPE_F32)
                e2m1_wide(packed + at * 16, first, second, wide + at * 32);
            else
                e2m1_narrow(packed + at * 16, first, second, dtype, narrow + at * 32);
        }
    }
    return batches;
}

uint64_t lh_unpack_e2m1_avx2(const struct lh_unpack *unpack, const uint8_t *packed,
                             const uint8_t *scales, float factor, uint64_t batches, void *out)
{
    bool is_plain = unpack->rounding == LH_DTYPE_F32 || unpack->rounding == LH_DTYPE_BF16;
    if (unpack->dtype == LH_DTYPE_BF16 && is_plain)
        return e2m1_unpack(unpack, packed, scales, factor, batches, out, LH_DTYPE_F32,
                           LH_DTYPE_BF16);
    return e2m1_unpack(unpack, packed, scales, factor, batches, out, unpack->rounding,
                       unpack->dtype);
}

/* --- Scales in grains ------------------------------------------------------------------------- */

static inline float half_value(uint16_t half)
{
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

/* Eight of the signed bytes, from the low end of a half on. */
static inline __m256 byte_values(__m128i bytes)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

/* Store 32 signed bytes times a scale for each 16. */
static inline __attribute__((always_inline)) void
scaled_put(__m256i bytes, float first, float second, uint32_t dtype, void *out, uint64_t at)
{
    __m256 factors[2] = {_mm256_set1_ps(first), _mm256_set1_ps(second)};
    __m128i halves[2] = {_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)};
    for (int i = 0; i < 2; i++)
        sixteen_put(_mm256_mul_ps(byte_values(halves[i]), factors[i]),
                    _mm256_mul_ps(byte_values(_mm_srli_si128(halves[i], 8)), factors[i]), dtype,
                    out, at + 16 * (uint64_t)i);
}

#include "compute/unpack_grains_body.h"

/* The 16 values, narrowed, that 4 bits can have: codes 0 to 7, and 8 to 15 in the other half. */
static inline __attribute__((always_inline)) __m256i q4_k_values(float scale, float minimum,
                                                                 uint32_t dtype)
{
    const __m256 factor = _mm256_set1_ps(scale), less = _mm256_set1_ps(minimum);
    const __m256 codes[2] = {_mm256_setr_ps(0, 1, 2, 3, 8, 9, 10, 11),
                             _mm256_setr_ps(4, 5, 6, 7, 12, 13, 14, 15)};
    __m256 first = _mm256_sub_ps(_mm256_mul_ps(codes[0], factor), less);
    __m256 second = _mm256_sub_ps(_mm256_mul_ps(codes[1], factor), less);
    if (dtype == LH_DTYPE_BF16)
        return _mm256_packus_epi32(bf16_rounded(first), bf16_rounded(second));
    return _mm256_permutevar8x32_epi32(_mm256_set_m128i(half_rounded(second), half_rounded(first)),
                                       _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7));
}

/* Decode 64 elements of Q4_K, two parts of a grain, from 32 bytes to 16 bits. */
static inline __attribute__((always_inline)) void q4_k_narrow(const uint8_t *pairs,
                                                              const float *scales,
                                                              const float *minima, uint32_t dtype,
                                                              uint16_t *out)
{
    const __m256i low_bits = _mm256_set1_epi16(0xFF), low_nibbles = _mm256_set1_epi8(15);
    const __m256i shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
    __m256i one = q4_k_values(scales[0], minima[0], dtype);
    __m256i other = q4_k_values(scales[1], minima[1], dtype);
    __m256i begin = _mm256_permute2x128_si256(one, other, 0x20);
    __m256i end = _mm256_permute2x128_si256(one, other, 0x31);
    __m256i lows =
        _mm256_packus_epi16(_mm256_and_si256(begin, low_bits), _mm256_and_si256(end, low_bits));
    __m256i highs = _mm256_packus_epi16(_mm256_srli_epi16(begin, 8), _mm256_srli_epi16(end, 8));
    for (int i = 0; i < 32; i += 16, pairs += 16, out += 16) {
        __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)pairs));
        __m256i codes = _mm256_and_si256(_mm256_srlv_epi32(bytes, shifts), low_nibbles);
        __m256i low = _mm256_shuffle_epi8(lows, codes);
        __m256i high = _mm256_shuffle_epi8(highs, codes);
        begin = _mm256_unpacklo_epi8(low, high);
        end = _mm256_unpackhi_epi8(low, high);
        _mm256_storeu_si256((void *)out, _mm256_permute2x128_si256(begin, end, 0x20));
        _mm256_storeu_si256((void *)(out + 32), _mm256_permute2x128_si256(begin, end, 0x31));
    }
}

/* The same to fp32. */
static inline void q4_k_wide(const uint8_t *pairs, const float *scales, const float *minima,
                             float *out)
{
    for (int i = 0; i < 64; i += 8) {
        const __m256 factor = _mm256_set1_ps(scales[i / 32]);
        const __m256 less = _mm256_set1_ps(minima[i / 32]);
        __m128i eight = _mm_loadl_epi64((const void *)(pairs + i % 32));
        eight = _mm_and_si128(_mm_srli_epi16(eight, i / 32 * 4), _mm_set1_epi8(15));
        _mm256_storeu_ps(out + i, _mm256_sub_ps(_mm256_mul_ps(byte_values(eight), factor), less));
    }
}

/* Widen the eight scales and minima of a grain of Q4_K. */
static inline void q4_k_scales(const uint8_t *grain, const uint16_t *halves, float *scales,
                               float *minima)
{
    uint8_t times[8], less[8];
    lh_unpack_q4_k_scales(grain, times, less);
    _mm256_storeu_ps(scales, _mm256_mul_ps(_mm256_set1_ps(half_value(halves[0])),
                                           byte_values(_mm_loadl_epi64((const void *)times))));
    _mm256_storeu_ps(minima, _mm256_mul_ps(_mm256_set1_ps(half_value(halves[1])),
                                           byte_values(_mm_loadl_epi64((const void *)less))));
}

static inline __attribute__((always_inline)) uint64_t q4_k_unpack(const uint8_t *packed,
                                                                  uint64_t count, void *out,
                                                                  uint32_t dtype)
{
    for (uint64_t i = 0; i < count; i++, packed += LH_UNPACK_Q4_K_BYTES) {
        uint8_t grain[LH_UNPACK_Q4_K_BYTES]; /* `out` may overlap what is packed */
        uint16_t halves[2];
        float scales[8], minima[8];
        memcpy(grain, packed, sizeof(grain));
        memcpy(halves, grain, sizeof(halves));
        if (!half_is_finite(halves[0]) || !half_is_finite(halves[1]))
            return i;
        q4_k_scales(grain, halves, scales, minima);
        for (uint32_t pair = 0; pair < 4; pair++) {
            const uint8_t *pairs = grain + 16 + 32 * pair;
            uint64_t at = LH_UNPACK_GRAIN_MAX * i + 64 * pair;
            if (dtype == LH_DTYPE_F32)
                q4_k_wide(pairs, scales + 2 * pair, minima + 2 * pair, (float *)out + at);
            else
                q4_k_narrow(pairs, scales + 2 * pair, minima + 2 * pair, dtype,
                            (uint16_t *)out + at);
        }
    }
    return count;
}

/*
 * Store 32 elements, which a table has for their 4 bits, times a finite scale. For results of 16
 * bits the 16 products are rounded once, and then looked up.
 */
static inline __attribute__((always_inline)) void table_put(const uint8_t *packed,
                                                            const int8_t *table, float scale,
                                                            uint32_t dtype, void *out, uint64_t at)
{
    const __m128i low_nibbles = _mm_set1_epi8(15), values = _mm_loadu_si128((const void *)table);
    __m128i pairs = _mm_loadu_si128((const void *)packed);
    __m128i low = _mm_and_si128(pairs, low_nibbles);
    __m128i high = _mm_and_si128(_mm_srli_epi16(pairs, 4), low_nibbles);
    if (dtype == LH_DTYPE_F32) {
        low = _mm_shuffle_epi8(values, low);
        high = _mm_shuffle_epi8(values, high);
        scaled_put(_mm256_set_m128i(high, low), scale, scale, dtype, out, at);
        return;
    }
    const __m256 factor = _mm256_set1_ps(scale);
    __m256i lows, highs;
    bytes_split(narrowed(_mm256_mul_ps(byte_values(values), factor), dtype),
                narrowed(_mm256_mul_ps(byte_values(_mm_srli_si128(values, 8)), factor), dtype),
                &lows, &highs);
    looked_up_put(_mm256_set_m128i(high, low), lows, highs, (uint16_t *)out + at);
}

static inline __attribute__((always_inline)) uint64_t table_unpack(uint32_t format,
                                                                   const uint8_t *packed,
                                                                   uint64_t count, void *out,
                                                                   uint32_t dtype)
{
    const bool is_power = format == LH_UNPACK_FORMAT_MXFP4;
    const uint64_t head = is_power ? 1 : sizeof(uint16_t);
    for (uint64_t i = 0; i < count; i++, packed += head + 16) {
        uint16_t half = 0;
        if (!is_power)
            memcpy(&half, packed, sizeof(half));
        if (is_power ? packed[0] == UINT8_MAX : !half_is_finite(half))
            return i;
        float scale = is_power ? lh_unpack_half_power(packed[0]) : half_value(half);
        table_put(packed + head, is_power ? lh_unpack_doubled : lh_unpack_iq4, scale, dtype, out,
                  32 * i);
    }
    return count;
}

static inline __attribute__((always_inline)) uint64_t iq4_xs_unpack(const uint8_t *packed,
                                                                    uint64_t count, void *out,
                                                                    uint32_t dtype)
{
    for (uint64_t i = 0; i < count; i++, packed += LH_UNPACK_IQ4_XS_BYTES) {
        uint8_t grain[LH_UNPACK_IQ4_XS_BYTES]; /* `out` may overlap what is packed */
        uint16_t half;
        int8_t scales[8];
        memcpy(grain, packed, sizeof(grain));
        memcpy(&half, grain, sizeof(half));
        if (!half_is_finite(half))
            return i;
        lh_unpack_iq4_xs_scales(grain, scales);
        for (uint32_t part = 0; part < 8; part++)
            table_put(grain + 8 + 16 * part, lh_unpack_iq4, half_value(half) * (float)scales[part],
                      dtype, out, LH_UNPACK_GRAIN_MAX * i + 32 * part);
    }
    return count;
}

static inline __attribute__((always_inline)) uint64_t grains_unpack(uint32_t format,
                                                                    const uint8_t *packed,
                                                                    uint64_t count, void *out,
                                                                    uint32_t dtype)
{
    if (format == LH_UNPACK_FORMAT_Q8_0)
        return q8_0_unpack(packed, count, out, dtype);
    if (format == LH_UNPACK_FORMAT_IQ4_XS)
        return iq4_xs_unpack(packed, count, out, dtype);
    if (format == LH_UNPACK_FORMAT_IQ4_NL || format == LH_UNPACK_FORMAT_MXFP4)
        return table_unpack(format, packed, count, out, dtype);
    return format == LH_UNPACK_FORMAT_Q4_K ? q4_k_unpack(packed, count, out, dtype)
                                           : q6_k_unpack(packed, count, out, dtype);
}

uint64_t lh_unpack_grains_avx2(const struct lh_unpack *unpack, const uint8_t *packed,
                               uint64_t count, void *out)
{
    if (unpack->dtype == LH_DTYPE_BF16)
        return grains_unpack(unpack->format, packed, count, out, LH_DTYPE_BF16);
    return grains_unpack(unpack->format, packed, count, out, unpack->dtype);
}

const struct lh_unpack_kernel lh_unpack_avx2 = {.bytes = lh_unpack_bytes_avx2,
                                                .nibbles = lh_unpack_nibbles_avx2,
                                                .e2m1 = lh_unpack_e2m1_avx2,
                                                .grains = lh_unpack_grains_avx2,
                                                .tile = lh_unpack_tile_avx2,
                                                .integers = lh_unpack_integers_avx2,
                                                .tables = lh_unpack_tables_avx2,
                                                .looked_up = lh_unpack_looked_up_avx2,
                                                .stored = lh_unpack_stored_avx2,
                                                .indexed = lh_unpack_indexed_avx2,
                                                .scaled = lh_unpack_scaled_avx2,
                                                .powers = lh_unpack_powers_avx2};

#endif
