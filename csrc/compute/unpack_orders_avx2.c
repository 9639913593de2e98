/* Decode tensors in other orders than rows with AVX2 and F16C: see [Note: Tiles]. */
#if defined(__x86_64__)

#include <string.h>

#include "compute/unpack_avx2.h"

/* --- Tiles ------------------------------------------------------------------------------------ */

/* Exchange `shift` bits of the words of b with those above them in the words of a. */
static inline void bits_swap(__m256i *a, __m256i *b, int shift, uint32_t mask)
{
    __m256i both = _mm256_xor_si256(_mm256_srli_epi32(*a, shift), *b);
    both = _mm256_and_si256(both, _mm256_set1_epi32((int32_t)mask));
    *b = _mm256_xor_si256(*b, both);
    *a = _mm256_xor_si256(*a, _mm256_slli_epi32(both, shift));
}

/* In each lane, exchange rows and columns of 8 x 8 parts of 4 bits. */
static inline void nibbles_transpose(__m256i *v)
{
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++)
        bits_swap(v + i, v + i + 4, 16, UINT32_C(0x0000FFFF));
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += i % 4 == 1 ? 3 : 1)
        bits_swap(v + i, v + i + 2, 8, UINT32_C(0x00FF00FF));
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2)
        bits_swap(v + i, v + i + 1, 4, UINT32_C(0x0F0F0F0F));
}

/*
 * Split 64 rows and 64 columns: words of parts[i][c] are part i of a word, and 8 columns. What is
 * `ahead` bytes after each column is prefetched into the second level of caches.
 */
static inline void columns_split(const uint8_t *words, uint64_t stride, uint64_t ahead,
                                 __m256i (*parts)[8])
{
    for (uint64_t c = 0; c < 8; c++) {
        __m256i v[8];
#pragma GCC unroll 8
        for (uint64_t i = 0; i < 8; i++) {
            const uint8_t *at = words + (8 * c + i) * stride;
            v[i] = _mm256_loadu_si256((const void *)at);
            __builtin_prefetch(at + ahead, 0, 2);
        }
        nibbles_transpose(v);
#pragma GCC unroll 8
        for (uint64_t i = 0; i < 8; i++)
            parts[i][c] = v[i];
    }
}

/* 0, 2, 4, 6, 1, 3, 5, 7 */
static inline uint64_t twice(uint64_t i)
{
    return i < 4 ? 2 * i : 2 * i - 7;
}

/* The row, of eight, of a part of a word. */
static inline uint64_t row_of(uint64_t part, bool is_awq)
{
    return is_awq ? twice(part) : part;
}

static void columns_tile(const uint8_t *words, uint64_t stride, bool is_awq, uint8_t *bits)
{
    __m256i parts[8][8];
    columns_split(words, stride, 0, parts);
    for (uint64_t i = 0; i < 8; i++) {
        words_exchange(parts[i]);
        for (uint64_t j = 0; j < 8; j++)
            _mm256_storeu_si256((void *)(bits + (8 * j + row_of(i, is_awq)) * LH_UNPACK_STRIP),
                                parts[i][j]);
    }
}

void lh_unpack_tile_avx2(const struct lh_unpack *unpack, const uint8_t *group, uint64_t row,
                         uint64_t column, uint8_t *bits)
{
    const uint64_t stride = unpack->group_rows / 2;
    columns_tile(group + column * stride + row / 2, stride, unpack->order == LH_UNPACK_ORDER_AWQ,
                 bits);
}

/* --- Rows ------------------------------------------------------------------------------------- */

/* Eight elements of 4 bits. */
static inline __m256i eight_nibbles(const uint8_t *bits)
{
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    int32_t word;
    memcpy(&word, bits, sizeof(word));
    return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(word), shifts),
                            _mm256_set1_epi32(15));
}

static inline __m256i eight_bytes(const uint8_t *bits)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)bits));
}

/* Store eight values. */
static inline __attribute__((always_inline)) void eight_put(__m256 value, uint32_t dtype, void *out,
                                                            uint64_t at)
{
    if (dtype == LH_DTYPE_F32)
        _mm256_storeu_ps((float *)out + at, value);
    else
        _mm_storeu_si128((void *)((uint16_t *)out + at), narrowed(value, dtype));
}

/* The 16 products are rounded once, and then looked up. */
static inline __attribute__((always_inline)) void nibbles_put(const uint8_t *bits, float zero,
                                                              float scale, uint64_t count,
                                                              uint16_t *out, uint32_t rounding,
                                                              uint32_t dtype)
{
    const __m256 factor = _mm256_set1_ps(scale), less = _mm256_set1_ps(zero);
    const __m256 codes = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 first = _mm256_sub_ps(codes, less);
    __m256 second = _mm256_sub_ps(_mm256_add_ps(codes, _mm256_set1_ps(8)), less);
    __m256i lows, highs;
    bytes_split(narrowed(product(first, factor, rounding), dtype),
                narrowed(product(second, factor, rounding), dtype), &lows, &highs);
    for (uint64_t i = 0; i < count; i += 32, bits += 16, out += 32) {
        __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)bits));
        __m256i both = _mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4));
        looked_up_put(_mm256_and_si256(both, _mm256_set1_epi8(15)), lows, highs, out);
    }
}

static inline __attribute__((always_inline)) void bytes_put(const uint8_t *bits, float zero,
                                                            float scale, uint64_t count, void *out,
                                                            uint32_t rounding, uint32_t dtype,
                                                            bool is_byte)
{
    const __m256 factor = _mm256_set1_ps(scale), less = _mm256_set1_ps(zero);
    for (uint64_t i = 0; i < count; i += 8) {
        __m256i code = is_byte ? eight_bytes(bits + i) : eight_nibbles(bits + i / 2);
        __m256 value = _mm256_sub_ps(_mm256_cvtepi32_ps(code), less);
        eight_put(product(value, factor, rounding), dtype, out, i);
    }
}

void lh_unpack_any_integers_avx2(const struct lh_unpack *unpack, const uint8_t *bits, float zero,
                                 float scale, uint64_t count, void *out)
{
    const bool is_byte = unpack->format == LH_UNPACK_FORMAT_U8;
    const bool is_usual = unpack->dtype == LH_DTYPE_BF16 && unpack->rounding == LH_DTYPE_F16;
    if (is_usual && !is_byte)
        nibbles_put(bits, zero, scale, count, out, LH_DTYPE_F16, LH_DTYPE_BF16);
    else if (is_usual)
        bytes_put(bits, zero, scale, count, out, LH_DTYPE_F16, LH_DTYPE_BF16, true);
    else if (!is_byte && unpack->dtype != LH_DTYPE_F32)
        nibbles_put(bits, zero, scale, count, out, unpack->rounding, unpack->dtype);
    else
        bytes_put(bits, zero, scale, count, out, unpack->rounding, unpack->dtype, is_byte);
}

/*
 * Halves rounded to bf16, none of which is denormal, infinite or a NaN: the mantissa loses 3 bits,
 * and the exponent has another bias.
 */
static inline __m256i halves_narrowed(__m256i halves)
{
    __m256i magnitude = _mm256_and_si256(halves, _mm256_set1_epi16(0x7FFF));
    __m256i is_zero = _mm256_cmpeq_epi16(magnitude, _mm256_setzero_si256());
    __m256i odd = _mm256_and_si256(_mm256_srli_epi16(magnitude, 3), _mm256_set1_epi16(1));
    __m256i nearest = _mm256_add_epi16(_mm256_add_epi16(magnitude, _mm256_set1_epi16(3)), odd);
    __m256i moved = _mm256_add_epi16(_mm256_srli_epi16(nearest, 3), _mm256_set1_epi16(112 << 7));
    return _mm256_or_si256(_mm256_andnot_si256(is_zero, moved),
                           _mm256_xor_si256(halves, magnitude));
}

/* The results of the 16 codes. If `is_usual`, see halves_narrowed(). */
static inline __attribute__((always_inline)) void table_make(float zero, float scale,
                                                             struct lh_unpack_table *table,
                                                             uint32_t rounding, uint32_t dtype,
                                                             bool is_usual)
{
    const __m256i split = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    const __m256 factor = _mm256_set1_ps(scale);
    const __m256 first =
        _mm256_sub_ps(_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_ps(zero));
    const __m256 second = _mm256_add_ps(first, _mm256_set1_ps(8));
    __m256i values;
    if (is_usual)
        values = halves_narrowed(_mm256_set_m128i(half_rounded(_mm256_mul_ps(second, factor)),
                                                  half_rounded(_mm256_mul_ps(first, factor))));
    else
        values = _mm256_set_m128i(narrowed(product(second, factor, rounding), dtype),
                                  narrowed(product(first, factor, rounding), dtype));
    values = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(values, split), 0xD8);
    _mm256_storeu_si256((void *)table, values);
}

static inline __attribute__((always_inline)) void
tables_make(const float *zeros, const float *scales, struct lh_unpack_table *tables,
            uint32_t rounding, uint32_t dtype, bool is_usual)
{
    for (uint64_t i = 0; i < 8; i++)
        table_make(zeros[i], scales[i], tables + i, rounding, dtype, is_usual);
}

/* Whether products of the scales and of other integers than 0, up to 16, are normal halves. */
static inline bool are_usual(const float *scales)
{
    __m256 magnitudes = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(scales));
    __m256 least = _mm256_cmp_ps(magnitudes, _mm256_set1_ps(LH_UNPACK_USUAL_MIN), _CMP_GE_OQ);
    __m256 most = _mm256_cmp_ps(magnitudes, _mm256_set1_ps(LH_UNPACK_USUAL_MAX), _CMP_LE_OQ);
    return _mm256_movemask_ps(_mm256_and_ps(least, most)) == 0xFF;
}

/* Eight zeros, from their word. */
static inline void zeros_widen(const struct lh_unpack *unpack, const uint8_t *words, float *zeros)
{
    const __m256i shifts = unpack->order == LH_UNPACK_ORDER_AWQ
                               ? _mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28)
                               : _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    uint32_t word;
    memcpy(&word, words, sizeof(word));
    __m256i all = _mm256_set1_epi32((int32_t)(word + unpack->zero * UINT32_C(0x11111111)));
    __m256i parts = _mm256_and_si256(_mm256_srlv_epi32(all, shifts), _mm256_set1_epi32(15));
    _mm256_storeu_ps(zeros, _mm256_cvtepi32_ps(parts));
}

void lh_unpack_tables_avx2(const struct lh_unpack *unpack, const float *scales,
                           const uint8_t *zeros, struct lh_unpack_table *tables)
{
    /* Rounding to bf16 twice is rounding to bf16 once. */
    const bool is_bf16 = unpack->dtype == LH_DTYPE_BF16;
    const bool is_half = is_bf16 && unpack->rounding == LH_DTYPE_F16;
    float less[8];
    _mm256_storeu_ps(less, _mm256_set1_ps((float)unpack->zero));
    for (uint64_t i = 0; i < LH_UNPACK_BATCH; i += 8) {
        if (zeros)
            zeros_widen(unpack, zeros + i / 2, less);
        if (is_half && (zeros || unpack->zero <= 16) && are_usual(scales + i))
            tables_make(less, scales + i, tables + i, LH_DTYPE_F16, LH_DTYPE_BF16, true);
        else if (is_bf16 && !is_half)
            tables_make(less, scales + i, tables + i, LH_DTYPE_F32, LH_DTYPE_BF16, false);
        else
            tables_make(less, scales + i, tables + i, unpack->rounding, unpack->dtype, false);
    }
}

void lh_unpack_stored_avx2(void)
{
    _mm_sfence();
}

/*
 * Look up the 64 codes of a row. Its words are in the order 0, 2, 4, 6, 1, 3, 5, 7, so that what is
 * interleaved in each half of a register is in the order of columns. The stores bypass the caches:
 * rows are far from each other, so that a read of each line before its first store would take
 * longer than everything else.
 */
static inline void row_look_up(__m256i words, const struct lh_unpack_table *const *tables,
                               uint64_t row, uint16_t *out)
{
    const __m256i low_nibbles = _mm256_set1_epi8(15);
    __m256i even = _mm256_and_si256(words, low_nibbles);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi16(words, 4), low_nibbles);
    __m256i codes[2] = {_mm256_unpacklo_epi8(even, odd), _mm256_unpackhi_epi8(even, odd)};
#pragma GCC unroll 8
    for (int i = 0; i < 2; i++, out += 32) {
        const struct lh_unpack_table *table = tables[i] + row;
        __m128i lows = _mm_loadu_si128((const void *)table->lows);
        __m128i highs = _mm_loadu_si128((const void *)table->highs);
        __m256i low = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(lows), codes[i]);
        __m256i high = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(highs), codes[i]);
        _mm256_stream_si256((void *)out, _mm256_unpacklo_epi8(low, high));
        _mm256_stream_si256((void *)(out + 16), _mm256_unpackhi_epi8(low, high));
    }
}

void lh_unpack_looked_up_avx2(const struct lh_unpack *unpack, const uint8_t *group, uint64_t row,
                              uint64_t rows, uint64_t column,
                              const struct lh_unpack_table *const *tables, uint16_t *out)
{
    const uint64_t columns = unpack->columns;
    if (unpack->order == LH_UNPACK_ORDER_WORDS) {
        const uint64_t stride = unpack->group_rows * sizeof(uint32_t);
        const uint8_t *words = group + column / 8 * stride + row * sizeof(uint32_t);
        for (uint64_t r = 0; r < rows; r += 8) {
            __m256i v[8];
#pragma GCC unroll 8
            for (uint64_t i = 0; i < 8; i++)
                v[i] = _mm256_loadu_si256((const void *)(words + twice(i) * stride + 4 * r));
            words_exchange(v);
#pragma GCC unroll 8
            for (uint64_t i = 0; i < 8; i++)
                row_look_up(v[i], tables, r + i, out + (r + i) * columns);
        }
        return;
    }
    const uint64_t stride = unpack->group_rows / 2;
    const uint64_t ahead = columns - column >= 2 * LH_UNPACK_TILE ? LH_UNPACK_TILE * stride : 0;
    for (uint64_t r = 0; r < rows; r += LH_UNPACK_TILE) {
        __m256i parts[8][8];
        columns_split(group + column * stride + (row + r) / 2, stride, ahead, parts);
#pragma GCC unroll 8
        for (uint64_t i = 0; i < 8; i++) {
            const uint64_t at = r + row_of(i, unpack->order == LH_UNPACK_ORDER_AWQ);
            __m256i v[8];
#pragma GCC unroll 8
            for (uint64_t j = 0; j < 8; j++)
                v[j] = parts[i][twice(j)];
            words_exchange(v);
#pragma GCC unroll 8
            for (uint64_t j = 0; j < 8; j++)
                row_look_up(v[j], tables, at + 8 * j, out + (at + 8 * j) * columns);
        }
    }
}

static inline __attribute__((always_inline)) void scaled_put(const uint8_t *bits,
                                                             const float *scales, uint64_t count,
                                                             void *out, uint32_t rounding,
                                                             uint32_t dtype)
{
    const __m256 magnitudes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    for (uint64_t i = 0; i < count; i += 8) {
        __m256i code = eight_nibbles(bits + i / 2);
        __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(8)), 28);
        __m256 value = _mm256_permutevar8x32_ps(magnitudes, code);
        value = _mm256_xor_ps(value, _mm256_castsi256_ps(sign));
        value = product(value, _mm256_loadu_ps(scales + i), rounding);
        if (dtype != LH_DTYPE_BF16 || rounding != LH_DTYPE_F32) {
            eight_put(value, dtype, out, i);
            continue;
        }
        /* Powers of two times values of two bits have no more bits than bf16. */
        __m256i high = _mm256_srli_epi32(_mm256_castps_si256(value), 16);
        __m128i narrow =
            _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
        _mm_storeu_si128((void *)((uint16_t *)out + i), narrow);
    }
}

void lh_unpack_scaled_avx2(const struct lh_unpack *unpack, const uint8_t *bits, const float *scales,
                           uint64_t count, void *out)
{
    /* Rounding to bf16 twice is rounding to bf16 once. */
    if (unpack->dtype == LH_DTYPE_BF16 && unpack->rounding != LH_DTYPE_F16)
        scaled_put(bits, scales, count, out, LH_DTYPE_F32, LH_DTYPE_BF16);
    else
        scaled_put(bits, scales, count, out, unpack->rounding, unpack->dtype);
}

/* --- Powers of two ---------------------------------------------------------------------------- */

/* What the elements of half a tile's rows are scaled by, a number for each column. */
struct powers {
    int16_t steps[LH_UNPACK_TILE]; /* added to the exponents of bf16 */
    float scales[LH_UNPACK_TILE];
    bool is_usual; /* no product but 0 is denormal, infinite or a NaN: `steps` serve */
};

static inline void powers_widen(const uint8_t *bytes, struct powers *powers)
{
    const __m256i least = _mm256_set1_epi8(2), most = _mm256_set1_epi8((char)252);
    __m256i usual = _mm256_set1_epi8(-1);
    for (uint64_t i = 0; i < LH_UNPACK_TILE; i += 32) {
        __m256i all = _mm256_loadu_si256((const void *)(bytes + i));
        __m256i within = _mm256_min_epu8(_mm256_max_epu8(all, least), most);
        usual = _mm256_and_si256(usual, _mm256_cmpeq_epi8(all, within));
    }
    powers->is_usual = _mm256_movemask_epi8(usual) == -1;
    for (uint64_t i = 0; i < LH_UNPACK_TILE && powers->is_usual; i += 16) {
        __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)(bytes + i)));
        wide = _mm256_slli_epi16(_mm256_sub_epi16(wide, _mm256_set1_epi16(127)), 7);
        _mm256_storeu_si256((void *)(powers->steps + i), wide);
    }
    for (uint64_t i = 0; i < LH_UNPACK_TILE && !powers->is_usual; i++) {
        /* 2^-127 is denormal, and 255 stands for the positive quiet NaN. */
        uint32_t is_special = bytes[i] == 0 || bytes[i] == UINT8_MAX;
        uint32_t bits = (uint32_t)bytes[i] << 23 | is_special << 22;
        memcpy(powers->scales + i, &bits, sizeof(bits));
    }
}

/* The 64 codes of a row, as row_look_up(): its words are in the order 0, 2, 4, 6, 1, 3, 5, 7. */
static inline void row_step(__m256i words, const int16_t *steps, uint16_t *out)
{
    /* The bits of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 in bf16, and of their negatives. */
    const __m256i lows = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64));
    const __m256i highs = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, -0x80, -0x41, -0x41, -0x41,
                      -0x40, -0x40, -0x40, -0x40));
    const __m256i kept = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -1, -1, -1, -1, -1, -1, -1, 0, -1, -1, -1, -1, -1, -1, -1));
    const __m256i low_nibbles = _mm256_set1_epi8(15);
    __m256i even = _mm256_and_si256(words, low_nibbles);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi16(words, 4), low_nibbles);
    __m256i codes[2] = {_mm256_unpacklo_epi8(even, odd), _mm256_unpackhi_epi8(even, odd)};
#pragma GCC unroll 8
    for (int i = 0; i < 2; i++, out += 32, steps += 32) {
        __m256i low = _mm256_shuffle_epi8(lows, codes[i]);
        __m256i high = _mm256_shuffle_epi8(highs, codes[i]);
        __m256i mask = _mm256_shuffle_epi8(kept, codes[i]);
        __m256i first = _mm256_loadu_si256((const void *)steps);
        __m256i second = _mm256_loadu_si256((const void *)(steps + 16));
        first = _mm256_and_si256(first, _mm256_unpacklo_epi8(mask, mask));
        second = _mm256_and_si256(second, _mm256_unpackhi_epi8(mask, mask));
        _mm256_stream_si256((void *)out, _mm256_add_epi16(_mm256_unpacklo_epi8(low, high), first));
        _mm256_stream_si256((void *)(out + 16),
                            _mm256_add_epi16(_mm256_unpackhi_epi8(low, high), second));
    }
}

/*
 * Eight products with the codes of a word of such a row. Powers of two times values of two bits fit
 * in bf16.
 */
static inline __m256i word_scale(__m256i words, uint64_t word, const float *scales)
{
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m256 magnitudes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    const __m256i place = _mm256_set1_epi32((int32_t)(word % 2 * 4 + word / 2));
    __m256i all = _mm256_permutevar8x32_epi32(words, place);
    __m256i codes = _mm256_srlv_epi32(all, shifts); /* in the low bits */
    __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
    __m256 value = _mm256_permutevar8x32_ps(magnitudes, codes);
    value = _mm256_or_ps(value, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
    value = _mm256_mul_ps(value, _mm256_loadu_ps(scales + 8 * word));
    return _mm256_srli_epi32(_mm256_castps_si256(value), 16);
}

static void row_scale(__m256i words, const float *scales, uint16_t *out)
{
    for (uint64_t i = 0; i < 8; i += 2) {
        __m256i both =
            _mm256_packus_epi32(word_scale(words, i, scales), word_scale(words, i + 1, scales));
        _mm256_stream_si256((void *)(out + 8 * i), _mm256_permute4x64_epi64(both, 0xD8));
    }
}

void lh_unpack_powers_avx2(const struct lh_unpack *unpack, const uint8_t *group, uint64_t row,
                           uint64_t rows, uint64_t column, const uint8_t *scales, uint16_t *out)
{
    const uint64_t columns = unpack->columns, stride = unpack->group_rows / 2;
    const uint64_t ahead = columns - column >= 2 * LH_UNPACK_TILE ? LH_UNPACK_TILE * stride : 0;
    for (uint64_t r = 0; r < rows; r += LH_UNPACK_TILE, scales += 2 * (size_t)LH_UNPACK_TILE) {
        __m256i parts[8][8];
        struct powers powers[2];
        powers_widen(scales, powers);
        powers_widen(scales + LH_UNPACK_TILE, powers + 1);
        columns_split(group + column * stride + (row + r) / 2, stride, ahead, parts);
        for (uint64_t i = 0; i < 8; i++) {
            __m256i v[8];
#pragma GCC unroll 8
            for (uint64_t j = 0; j < 8; j++)
                v[j] = parts[i][twice(j)];
            words_exchange(v);
#pragma GCC unroll 8
            for (uint64_t j = 0; j < 8; j++) {
                uint16_t *to = out + (r + 8 * j + i) * columns;
                if (powers[j / 4].is_usual)
                    row_step(v[j], powers[j / 4].steps, to);
                else
                    row_scale(v[j], powers[j / 4].scales, to);
            }
        }
    }
}

#endif
