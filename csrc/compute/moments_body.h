/*
 * The conversions of stored moments (adam_states.h) for vectors of any width. Each file that
 * includes this header, after rule_body.h, whose operations it uses, defines the functions' names
 * (DECODE, ENCODE, DECODE_4BIT, ENCODE_4BIT, ROUND_BF16), and:
 *
 *      largest_of()                the greatest lane
 *      bytes_store()               store the low byte of each word
 *
 * Floats that are not negative are ordered like their bits, so all comparisons are of integers.
 */
#ifndef LH_COMPUTE_MOMENTS_BODY_H
#define LH_COMPUTE_MOMENTS_BODY_H

#include "compute/rule_body.h"

#define BATCH 4 /* blocks */
#define INFINITE UINT32_C(0x7F800000)
#define ONE LH_ADAM_8BIT_ONE

void DECODE(const struct lh_adam_moments *moments, float *moment1, float *moment2, uint64_t count)
{
    for (uint64_t i = 0; i < count; i += LANES) {
        const struct units units = units_of(moments, i, LH_ADAM_STATES_8BIT);

        if (moment1)
            words_store(moment1, i, 4, (words)codes1_decode(moments->moment1, i, units));
        if (moment2)
            words_store(moment2, i, 4, (words)codes2_decode(moments->moment2, i, units));
    }
}

void DECODE_4BIT(const struct lh_adam_moments *moments, float *moment1, float *moment2,
                 uint64_t count)
{
    for (uint64_t i = 0; i < count; i += LANES) {
        values m, v;

        pairs_decode(moments->moment1, i, units_of(moments, i, LH_ADAM_STATES_4BIT), &m, &v);
        words_store(moment1, i, 4, (words)m);
        words_store(moment2, i, 4, (words)v);
    }
}

/* The integers nearest to values. */
static INLINE words nearest(values a)
{
    return (words)(a + splat(LH_ADAM_8BIT_ROUND)) - LH_ADAM_8BIT_ROUND_BITS;
}

/* The nearest code of values: code_of() in adam_states.c. */
static INLINE words codes_of(values a, const int shift)
{
    const uint32_t half = UINT32_C(1) << (shift - 1);

    return ((words)(a + splat(1)) - (ONE - half)) >> shift;
}

/* The largest magnitude of a block, as bits; 0 if the block is NULL. */
static INLINE uint32_t block_largest(const float *block)
{
    words most = {0};

    if (!block)
        return 0;
#pragma GCC unroll 4
    for (uint64_t i = 0; i < LH_ADAM_STATES_BLOCK; i += LANES)
        most = greater(most, words_load(block, i) & MAGNITUDE);
    return largest_of(most);
}

/* Magnitudes as parts of the largest, in [0, 1]. */
static INLINE values parts_of(words magnitudes, float inverse)
{
    return (values)lesser((words)((values)magnitudes * splat(inverse)), (words){0} + ONE);
}

/* The factors that bring a block's values into [0, 1]; negative if the block has a NaN. */
struct inverses {
    float moment1, root;
};

/* The part of an array that begins at a block; NULL of NULL. */
static INLINE const float *part_of(const float *array, uint64_t block)
{
    return array ? array + block * LH_ADAM_STATES_BLOCK : NULL;
}

/* Make the scales of a block. */
static INLINE struct inverses block_scale(struct lh_adam_scales *scales, const float *moment1,
                                          const float *roots)
{
    const uint32_t largest1 = block_largest(moment1), largest2 = block_largest(roots);

    if (largest1 > INFINITE || largest2 > INFINITE)
        return (struct inverses){-1, -1};
    *scales = (struct lh_adam_scales){lh_adam_8bit_scale(largest1), lh_adam_8bit_scale(largest2)};
    return (struct inverses){lh_adam_8bit_inverse(scales->moment1),
                             lh_adam_8bit_inverse(scales->moment2)};
}

/* Make the codes of a block of moments that has no NaN. */
static INLINE void codes1_encode(void *codes, const float *moment1, float inverse)
{
#pragma GCC unroll 4
    for (uint64_t i = 0; i < LH_ADAM_STATES_BLOCK; i += LANES) {
        words m = words_load(moment1, i), sign = (words)((ints)m >> 31);
        words code = codes_of(parts_of(m & MAGNITUDE, inverse) * splat(LH_ADAM_8BIT_MAX1),
                              LH_ADAM_8BIT_CODE_SHIFT);

        bytes_store((uint8_t *)codes + i, (code ^ sign) - sign);
    }
}

/* Make the codes of a block of roots that has no NaN. */
static INLINE void codes2_encode(void *codes, const float *roots, float inverse)
{
    const words least = (words){0} + (inverse != 0);

#pragma GCC unroll 4
    for (uint64_t i = 0; i < LH_ADAM_STATES_BLOCK; i += LANES) {
        words root = words_load(roots, i) & MAGNITUDE;
        words code = nearest(parts_of(root, inverse) * splat(LH_ADAM_8BIT_MAX2));

        bytes_store((uint8_t *)codes + i, greater(code, lesser(root, least)));
    }
}

/* Make the bytes of a block of both moments that has no NaN. */
static INLINE void pairs_encode(uint8_t *codes, const float *moment1, const float *roots,
                                struct inverses inverses)
{
    const words one = (words){0} + 1;

#pragma GCC unroll 4
    for (uint64_t i = 0; i < LH_ADAM_STATES_BLOCK; i += LANES) {
        words m = words_load(moment1, i), sign = (words)((ints)m >> 31);
        words root = words_load(roots, i) & MAGNITUDE;
        values part1 = parts_of(m & MAGNITUDE, inverses.moment1);
        words code1 = codes_of(part1 * splat(LH_ADAM_4BIT_MAX1), LH_ADAM_4BIT_CODE_SHIFT);
        words number = nearest(parts_of(root, inverses.root) * splat(LH_ADAM_4BIT_MAX2));

        code1 = ((code1 ^ sign) - sign) & 0xF;
        bytes_store(codes + i, code1 | (greater(number, one) - one) << 4);
    }
}

/* Encode at most BATCH blocks. The scales are made first, so that their divisions overlap. */
static INLINE void batch_encode(const struct lh_adam_moments *batch, const float *moment1,
                                const float *roots, uint64_t block_count, const bool is_4bit)
{
    int8_t *const codes1 = batch->moment1;
    uint8_t *const codes2 = batch->moment2;
    struct inverses inverses[BATCH];

    for (uint64_t b = 0; b < block_count; b++)
        inverses[b] = block_scale(batch->scales + b, part_of(moment1, b), part_of(roots, b));
    for (uint64_t b = 0; b < block_count; b++) {
        const uint64_t first = b * LH_ADAM_STATES_BLOCK;

        if (inverses[b].root < 0) {
            const struct lh_adam_moments block = lh_adam_moments_from(batch, first);

            (is_4bit ? lh_adam_4bit_encode_ref : lh_adam_8bit_encode_ref)(
                &block, part_of(moment1, b), part_of(roots, b), LH_ADAM_STATES_BLOCK);
            continue;
        }
        if (is_4bit) {
            pairs_encode((uint8_t *)codes1 + first, moment1 + first, roots + first, inverses[b]);
            continue;
        }
        if (moment1)
            codes1_encode(codes1 + first, moment1 + first, inverses[b].moment1);
        if (roots)
            codes2_encode(codes2 + first, roots + first, inverses[b].root);
    }
}

/* Encode blocks with scales. */
static INLINE void blocks_encode(const struct lh_adam_moments *moments, const float *moment1,
                                 const float *roots, uint64_t count, const bool is_4bit)
{
    const uint64_t block_count = count / LH_ADAM_STATES_BLOCK;

    for (uint64_t b = 0; b < block_count; b += BATCH) {
        const struct lh_adam_moments batch =
            lh_adam_moments_from(moments, b * LH_ADAM_STATES_BLOCK);

        batch_encode(&batch, part_of(moment1, b), part_of(roots, b),
                     lh_min_u64(block_count - b, BATCH), is_4bit);
    }
}

void ENCODE(const struct lh_adam_moments *moments, const float *moment1, const float *roots,
            uint64_t count)
{
    blocks_encode(moments, moment1, roots, count, false);
}

void ENCODE_4BIT(const struct lh_adam_moments *moments, const float *moment1, const float *roots,
                 uint64_t count)
{
    blocks_encode(moments, moment1, roots, count, true);
}

/* Round one moment with the upper or the lower halves of the random words. */
static INLINE void bf16_round(uint16_t *target, const float *source, const uint32_t *random,
                              uint64_t count, const bool is_first)
{
    for (uint64_t i = 0; source && i < count; i += STEP_ELEMENTS) {
        words rounded[2];

#pragma GCC unroll 2
        for (uint64_t half = 0; half < 2; half++) {
            const uint64_t at = i + half * LANES;
            words a = words_load(source, at), word = words_load(random, at);

            /* lh_zo_rounded() keeps the sign of a NaN. */
            rounded[half] = randomized((values)a, is_first ? word >> 16 : word & 0xFFFF);
            rounded[half] |= a & ~MAGNITUDE;
        }
        words_store(target, i, 2, uppers_of(rounded[0], rounded[1]));
    }
}

void ROUND_BF16(const struct lh_adam_moments *moments, const float *moment1, const float *moment2,
                const uint32_t *random, uint64_t count)
{
    bf16_round(moments->moment1, moment1, random, count, true);
    bf16_round(moments->moment2, moment2, random, count, false);
}

#endif
