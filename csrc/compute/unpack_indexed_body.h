/*
 * The body of the kernels indexed() and integers(): see struct lh_unpack_kernel. A file for an
 * instruction set includes it once, after it has defined
 *
 *      LANES               32-bit words in a register, which belong to consecutive rows
 *      words, floats       vectors of LANES elements
 *      fused()             a * b + c of a vector, a number and a vector, rounded once
 *      fused_all()         the same of three vectors
 *      widened()           integers as numbers
 *      bytes_picked()      one of the four bytes of each word
 *      halves_widened()    a part of 32 bytes: LANES pairs of bytes as words
 *      odd_chosen()        one of two numbers for each word: whether its bit 16 is clear, or set
 *      high_joined()       the high halves of words, as the low and the high halves of others
 *      larger()            the larger ones of a vector and a number
 *      settled_rounded()   values rounded to `rounding`; every NaN becomes the positive quiet one
 *      half_bits()         values rounded to fp16, in the low halves of words
 *      words_transpose()   exchange rows and columns of LANES registers
 *      words_put()         store a register; past the caches, if the address is aligned to it
 *      bytes_widened()     LANES bytes as words
 *      high_halves()       the high halves of the words of two registers, one after the other
 *      INDEXED, INTEGERS   the names of the kernels
 *
 * Only csrc/compute includes this header.
 */
#ifndef LH_COMPUTE_UNPACK_INDEXED_BODY_H
#define LH_COMPUTE_UNPACK_INDEXED_BODY_H

#define LINE_WORDS 16 /* in a cache line */

enum scales { SCALES_ANY, SCALES_USUAL, SCALES_SHORT };

/* Values with short scales: see [Note: Short scales]. */
static INLINE floats short_values(const uint8_t *at, uint64_t part, bool is_byte,
                                  const float *zeros, const float *scales)
{
    words codes;
    floats zero, scale;
    memcpy(&codes, at, sizeof(codes));
    memcpy(&zero, zeros, sizeof(zero));
    memcpy(&scale, scales, sizeof(scale));
    codes = is_byte ? bytes_picked(codes, part) : codes >> (uint32_t)(4 * part) & 15;
    return fused_all(widened(codes), scale, zero);
}

/* Products with short scales rounded to bf16, in the high halves of words, or first to fp16. */
static INLINE words short_bits(floats value, uint32_t rounding)
{
    const words bits = (words)value;
    if (rounding == LH_DTYPE_F16)
        return bits + odd_chosen(bits, 0x6FFF, 0x9000);
    return bits + odd_chosen(bits, 0x7FFF, 0x8000);
}

/* The element of a column in each row, not rounded: `part` counts the elements of a word. */
static INLINE floats column_values(const uint8_t *at, uint64_t part, bool is_byte,
                                   const float *zeros, const float *scales)
{
    words codes;
    floats value, zero, scale;
    memcpy(&codes, at, sizeof(codes));
    memcpy(&zero, zeros, sizeof(zero));
    memcpy(&scale, scales, sizeof(scale));
    codes = codes >> (uint32_t)(is_byte ? 8 * part : 4 * part) & (is_byte ? 255 : 15);
    value = (floats)(codes | UINT32_C(0x4B000000)); /* 2^23 + the code, exactly */
    return (value - zero) * scale;
}

/* Round to a number of bits: adding 1.5 * 2^(24 - bits) times a power of two drops the others. */
static INLINE floats bits_rounded(floats value, floats power, int bits)
{
    const float much = bits == 11 ? 0x1.8p13f : 0x1.8p16f;
    return fused(power, -much, fused(power, much, value));
}

/*
 * Round values whose scales are usual to bf16, in the high halves of words, or first to fp16. None
 * of them is infinite, a NaN or -0, or rounds to any of these. Halves that are denormal have the
 * ulp of the least normal one. Rounding may give the next power of two, which needs one bit.
 */
static INLINE words usual_bits(floats value, uint32_t rounding)
{
    floats power = (floats)((words)value & UINT32_C(0x7F800000));
    if (rounding == LH_DTYPE_F16)
        value = bits_rounded(value, larger(power, 0x1p-14f), 11);
    return (words)bits_rounded(value, power, 8);
}

/*
 * Decode elements of U8 that have one scale, which is usual, and one zero (plus 2^23) to bf16. All
 * that is stored at once is loaded before, because `out` may overlap what is packed.
 */
static INLINE void bytes_put(const uint8_t *packed, float zero, float scale, uint64_t count,
                             uint8_t *out, uint32_t rounding, bool is_past_caches)
{
    for (uint64_t i = 0; i < count; i += 2 * LANES) {
        words codes[2] = {bytes_widened(packed + i), bytes_widened(packed + i + LANES)};
        floats first = ((floats)(codes[0] | UINT32_C(0x4B000000)) - zero) * scale;
        floats second = ((floats)(codes[1] | UINT32_C(0x4B000000)) - zero) * scale;
        words_put(out + 2 * i,
                  high_halves(usual_bits(first, rounding), usual_bits(second, rounding)),
                  is_past_caches);
    }
}

void INTEGERS(const struct lh_unpack *unpack, const uint8_t *bits, float zero, float scale,
              uint64_t count, void *out)
{
    uint32_t size;
    memcpy(&size, &scale, sizeof(size));
    if (unpack->format != LH_UNPACK_FORMAT_U8 || unpack->dtype != LH_DTYPE_BF16 ||
        size < LH_UNPACK_USUAL_BITS_MIN || size > LH_UNPACK_USUAL_BITS_MAX)
        lh_unpack_any_integers_avx2(unpack, bits, zero, scale, count, out);
    else if (unpack->rounding == LH_DTYPE_F16)
        bytes_put(bits, zero + 0x1p23f, scale, count, out, LH_DTYPE_F16, false);
    else
        bytes_put(bits, zero + 0x1p23f, scale, count, out, LH_DTYPE_F32, false);
}

/* Rounded to a type of 16 bits, in the low halves of words. */
static INLINE words narrow_bits(floats value, uint32_t dtype)
{
    if (dtype == LH_DTYPE_F16)
        return half_bits(value);
    words bits = (words)value;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

/* The results of two columns that are neighbors, in the order of memory. */
static INLINE words pairs(floats first, floats second, uint32_t rounding, uint32_t dtype,
                          enum scales kind)
{
    if (kind == SCALES_SHORT)
        return high_joined(short_bits(first, rounding), short_bits(second, rounding));
    if (kind == SCALES_USUAL)
        return usual_bits(first, rounding) >> 16 | usual_bits(second, rounding);
    return narrow_bits(settled_rounded(first, rounding), dtype) |
           narrow_bits(settled_rounded(second, rounding), dtype) << 16;
}

/* Where the scales and zeros of LANES columns begin. */
static INLINE void places_put(const struct lh_unpack_indexed *all, uint64_t column,
                              uint32_t *places)
{
    words group = (words){0} + all->groups[column / LH_UNPACK_INDEXED_COLUMNS];
    if (all->index)
        memcpy(&group, all->index + column * sizeof(uint32_t), sizeof(group));
    words is_less = (words)(group < all->last);
    group = ((group & is_less) | (all->last & ~is_less)) * LH_UNPACK_INDEXED_ROWS;
    memcpy(places, &group, sizeof(group));
}

/* Decode LANES rows, and as many columns as fill a cache line of each. */
static INLINE void lines_put(const uint8_t *packed, uint64_t stride, const uint32_t *places,
                             uint64_t first, const struct lh_unpack_indexed *all, uint8_t *out,
                             uint64_t out_stride, uint32_t rounding, uint32_t dtype, bool is_byte,
                             enum scales kind)
{
    const uint64_t parts = is_byte ? 4 : 8, each = dtype == LH_DTYPE_F32 ? 1 : 2;
    const uint8_t *next = packed + all->ahead * stride;
    words v[LINE_WORDS];
#pragma GCC unroll 16
    for (uint64_t i = 0; i < LINE_WORDS; i++) {
        floats values[2] = {{0}};
#pragma GCC unroll 2
        for (uint64_t j = 0; j < each; j++) {
            const uint64_t column = each * i + j, place = places[column] + first;
            if (column % parts == 0 && first % LINE_WORDS == 0)
                __builtin_prefetch(next + column / parts * stride);
            const uint8_t *at = packed + column / parts * stride;
            values[j] = kind == SCALES_SHORT
                            ? short_values(at, column % parts, is_byte, all->zeros + place,
                                           all->scales + place)
                            : column_values(at, column % parts, is_byte, all->zeros + place,
                                            all->scales + place);
        }
        if (dtype == LH_DTYPE_F32)
            v[i] = (words)settled_rounded(values[0], rounding);
        else
            v[i] = pairs(values[0], values[1], rounding, dtype, kind);
        if (i % LANES == LANES - 1)
            words_transpose(v + i + 1 - LANES);
    }
#pragma GCC unroll 16
    for (uint64_t i = 0; i < LANES; i++)
#pragma GCC unroll 16
        for (uint64_t j = 0; j < LINE_WORDS; j += LANES)
            words_put(out + i * out_stride + 4 * j, v[i + j], all->is_past_caches);
}

/* Decode all rows, a line of each after the other. */
static INLINE void rows_put(const struct lh_unpack *unpack, const uint8_t *packed, uint64_t columns,
                            const struct lh_unpack_indexed *all, uint8_t *out, uint64_t out_stride,
                            uint32_t rounding, uint32_t dtype, bool is_byte, enum scales kind)
{
    const uint64_t stride = unpack->group_rows * sizeof(uint32_t), parts = is_byte ? 4 : 8;
    const uint64_t step = dtype == LH_DTYPE_F32 ? LINE_WORDS : 2 * LINE_WORDS;
    for (uint64_t c = 0; c < columns; c += step) {
        uint32_t places[2 * LINE_WORDS];
#pragma GCC unroll 4
        for (uint64_t i = 0; i < step; i += LANES)
            places_put(all, c + i, places + i);
        for (uint64_t r = 0; r < LH_UNPACK_INDEXED_ROWS; r += LANES)
            lines_put(packed + c / parts * stride + r * sizeof(uint32_t), stride, places, r, all,
                      out + r * out_stride + c / step * LINE_WORDS * sizeof(uint32_t), out_stride,
                      rounding, dtype, is_byte, kind);
    }
}

/* Decode 32 elements of U8 that have one scale, which is short, to bf16. */
static INLINE void short_bytes_put(__m256i bytes, float zero, float scale, uint8_t *out,
                                   uint32_t rounding, bool is_past_caches)
{
#pragma GCC unroll 2
    for (int i = 0; i < 16 / LANES; i++) {
        const words codes = halves_widened(bytes, i);
        floats first = fused(widened(codes & 255), scale, (floats){0} + zero);
        floats second = fused(widened(codes >> 8), scale, (floats){0} + zero);
        words_put(out + i * (int)sizeof(words),
                  high_joined(short_bits(first, rounding), short_bits(second, rounding)),
                  is_past_caches);
    }
}

/* Decode all rows of U8 to bf16 if each batch of columns has one group, with usual scales. */
static INLINE void byte_rows_put(const struct lh_unpack *unpack, const uint8_t *packed,
                                 uint64_t columns, const struct lh_unpack_indexed *all,
                                 uint8_t *out, uint64_t out_stride, uint32_t rounding,
                                 enum scales kind)
{
    const uint64_t stride = unpack->group_rows * sizeof(uint32_t);
    for (uint64_t b = 0; b < columns / LH_UNPACK_INDEXED_COLUMNS; b++) {
        const uint64_t place = all->groups[b] * LH_UNPACK_INDEXED_ROWS;
        const float *zeros = all->zeros + place, *scales = all->scales + place;
        for (uint64_t r = 0; r < LH_UNPACK_INDEXED_ROWS; r += 8) {
            const uint8_t *at = packed + 8 * b * stride + r * sizeof(uint32_t);
            __m256i v[8];
#pragma GCC unroll 8
            for (uint64_t i = 0; i < 8; i++) {
                v[i] = _mm256_loadu_si256((const void *)(at + i * stride));
                if (r % 16 == 0)
                    __builtin_prefetch(at + (all->ahead + i) * stride);
            }
            words_exchange(v);
#pragma GCC unroll 8
            for (uint64_t i = 0; i < 8; i++) {
                uint8_t *to = out + (r + i) * out_stride + 2 * b * LH_UNPACK_INDEXED_COLUMNS;
                if (kind == SCALES_SHORT)
                    short_bytes_put(v[i], zeros[r + i], scales[r + i], to, rounding,
                                    all->is_past_caches);
                else
                    bytes_put((const uint8_t *)(v + i), zeros[r + i], scales[r + i],
                              LH_UNPACK_INDEXED_COLUMNS, to, rounding, all->is_past_caches);
            }
        }
    }
}

/* Decode to bf16 rows whose scales are all usual; both arguments at the end are constants. */
static INLINE void usual_put(const struct lh_unpack *unpack, const uint8_t *packed,
                             uint64_t columns, const struct lh_unpack_indexed *all, uint8_t *out,
                             uint64_t out_stride, uint32_t rounding, enum scales kind)
{
    const bool is_byte = unpack->format == LH_UNPACK_FORMAT_U8;
    if (is_byte && !all->index)
        byte_rows_put(unpack, packed, columns, all, out, out_stride, rounding, kind);
    else if (is_byte)
        rows_put(unpack, packed, columns, all, out, out_stride, rounding, LH_DTYPE_BF16, true,
                 kind);
    else
        rows_put(unpack, packed, columns, all, out, out_stride, rounding, LH_DTYPE_BF16, false,
                 kind);
}

void INDEXED(const struct lh_unpack *unpack, const uint8_t *packed, uint64_t columns,
             const struct lh_unpack_indexed *all, uint8_t *out, uint64_t out_stride)
{
    const bool is_byte = unpack->format == LH_UNPACK_FORMAT_U8;
    const bool is_bf16 = unpack->dtype == LH_DTYPE_BF16;
    /* Rounding to a type twice is rounding to it once. */
    const uint32_t rounding =
        unpack->rounding == unpack->dtype ? (uint32_t)LH_DTYPE_F32 : unpack->rounding;
    const bool is_half = rounding == LH_DTYPE_F16;
    if (is_bf16 && all->is_short && is_half)
        usual_put(unpack, packed, columns, all, out, out_stride, LH_DTYPE_F16, SCALES_SHORT);
    else if (is_bf16 && all->is_short)
        usual_put(unpack, packed, columns, all, out, out_stride, LH_DTYPE_F32, SCALES_SHORT);
    else if (is_bf16 && all->is_usual && is_half)
        usual_put(unpack, packed, columns, all, out, out_stride, LH_DTYPE_F16, SCALES_USUAL);
    else if (is_bf16 && all->is_usual)
        usual_put(unpack, packed, columns, all, out, out_stride, LH_DTYPE_F32, SCALES_USUAL);
    else if (is_bf16)
        rows_put(unpack, packed, columns, all, out, out_stride, rounding, LH_DTYPE_BF16, is_byte,
                 SCALES_ANY);
    else if (unpack->dtype == LH_DTYPE_F16)
        rows_put(unpack, packed, columns, all, out, out_stride, rounding, LH_DTYPE_F16, is_byte,
                 SCALES_ANY);
    else
        rows_put(unpack, packed, columns, all, out, out_stride, rounding, LH_DTYPE_F32, is_byte,
                 SCALES_ANY);
}

#endif
