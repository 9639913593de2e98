/*
 * The conversions of 8-bit moments for vectors of any width, with the compiler's own vector types.
 * Each file that includes this header defines the width (VECTOR_BYTES), the functions' names
 * (DECODE, ENCODE, and the definition's DECODE_REF, ENCODE_REF for blocks with a NaN), and the
 * operations for which the target machine has special instructions.
 *
 * Floats that are not negative are ordered like their bits, so all comparisons are of integers.
 */
#ifndef LH_COMPUTE_ADAM_8BIT_BODY_H
#define LH_COMPUTE_ADAM_8BIT_BODY_H

#include "compute/adam_8bit.h"

#define LANES (VECTOR_BYTES / 4)
#define BATCH 4 /* blocks */
#define MAGNITUDE UINT32_C(0x7FFFFFFF)
#define INFINITE UINT32_C(0x7F800000)
#define ONE LH_ADAM_8BIT_ONE

/* Load floats of any alignment. */
static INLINE floats floats_load(const float *source)
{
    floats values;

    memcpy(&values, source, sizeof(values));
    return values;
}

/* The part of moments that is a block. */
static INLINE struct lh_adam_moments block_of(const struct lh_adam_moments *moments, uint64_t first)
{
    return (struct lh_adam_moments){
        .states = moments->states,
        .moment1 = (int8_t *)moments->moment1 + first,
        .moment2 = (uint8_t *)moments->moment2 + first,
        .scales = moments->scales + first / LH_ADAM_STATES_BLOCK,
    };
}

void DECODE(const struct lh_adam_moments *moments, float *moment1, float *moment2, uint64_t count)
{
    for (uint64_t first = 0; first < count; first += LH_ADAM_STATES_BLOCK) {
        const struct lh_adam_moments block = block_of(moments, first);
        const float unit1 = lh_adam_8bit_unit1(block.scales->moment1);
        const float unit2 = lh_adam_8bit_unit2(block.scales->moment2);

        if (has_nan_code(block.moment1, block.moment2)) {
            DECODE_REF(&block, moment1 + first, moment2 + first, LH_ADAM_STATES_BLOCK);
            continue;
        }
#pragma GCC unroll 4
        for (uint64_t i = 0; i < LH_ADAM_STATES_BLOCK; i += LANES) {
            words code1 = signed_load((const int8_t *)block.moment1 + i);
            words sign = (words)((ints)code1 >> 31);
            words bits1 = (((code1 ^ sign) - sign) << LH_ADAM_8BIT_CODE_SHIFT) + ONE;
            floats m = (floats)((words)(((floats)bits1 - 1) * unit1) | (sign & ~MAGNITUDE));
            floats v = unsigned_load((const uint8_t *)block.moment2 + i) * unit2;

            v *= v;

            memcpy(moment1 + first + i, &m, sizeof(m));
            memcpy(moment2 + first + i, &v, sizeof(v));
        }
    }
}

/* The integers nearest to values. */
static INLINE words nearest(floats values)
{
    return (words)(values + LH_ADAM_8BIT_ROUND) - LH_ADAM_8BIT_ROUND_BITS;
}

/* The nearest code of values in [0, 247]: code_of() in adam_states.c. */
static INLINE words codes_of(floats values)
{
    const uint32_t half = UINT32_C(1) << (LH_ADAM_8BIT_CODE_SHIFT - 1);

    return ((words)(values + 1.0f) - (ONE - half)) >> LH_ADAM_8BIT_CODE_SHIFT;
}

/* The factors that bring a block's values into [0, 1]; negative if the block has a NaN. */
struct inverses {
    float moment1, root;
};

/* Make the scales of a block. */
static INLINE struct inverses block_scale(const struct lh_adam_moments *block, const float *moment1,
                                          const float *roots)
{
    words most1 = {0}, most2 = {0};
    uint32_t largest1, largest2;

#pragma GCC unroll 4
    for (uint64_t i = 0; i < LH_ADAM_STATES_BLOCK; i += LANES) {
        most1 = greater(most1, (words)floats_load(moment1 + i) & MAGNITUDE);
        most2 = greater(most2, (words)floats_load(roots + i) & MAGNITUDE);
    }
    largest1 = largest_of(most1);
    largest2 = largest_of(most2);
    if (largest1 > INFINITE || largest2 > INFINITE)
        return (struct inverses){-1, -1};
    *block->scales =
        (struct lh_adam_scales){lh_adam_8bit_scale(largest1), lh_adam_8bit_scale(largest2)};
    return (struct inverses){lh_adam_8bit_inverse(block->scales->moment1),
                             lh_adam_8bit_inverse(block->scales->moment2)};
}

/* Make the codes of a block that has no NaN. */
static INLINE void block_encode(const struct lh_adam_moments *block, const struct inverses inverses,
                                const float *moment1, const float *roots)
{
    const words none = {0};
    const words least = none + (inverses.root != 0);

#pragma GCC unroll 4
    for (uint64_t i = 0; i < LH_ADAM_STATES_BLOCK; i += LANES) {
        words m = (words)floats_load(moment1 + i), root = (words)floats_load(roots + i) & MAGNITUDE;
        words part1 = lesser((words)((floats)(m & MAGNITUDE) * inverses.moment1), none + ONE);
        words part2 = lesser((words)((floats)root * inverses.root), none + ONE);
        words code1 = codes_of((floats)part1 * LH_ADAM_8BIT_MAX1);
        words code2 = nearest((floats)part2 * LH_ADAM_8BIT_MAX2);
        words sign = (words)((ints)m >> 31);

        bytes_store((uint8_t *)block->moment1 + i, (code1 ^ sign) - sign);
        bytes_store((uint8_t *)block->moment2 + i, greater(code2, lesser(root, least)));
    }
}

/* The scales of a batch of blocks are made first, so that their divisions overlap. */
void ENCODE(const struct lh_adam_moments *moments, const float *moment1, const float *roots,
            uint64_t count)
{
    for (uint64_t at = 0; at < count; at += BATCH * LH_ADAM_STATES_BLOCK) {
        uint64_t batch = lh_min_u64((count - at) / LH_ADAM_STATES_BLOCK, BATCH);
        struct inverses inverses[BATCH];

        for (uint64_t b = 0; b < batch; b++) {
            uint64_t first = at + b * LH_ADAM_STATES_BLOCK;
            const struct lh_adam_moments block = block_of(moments, first);

            inverses[b] = block_scale(&block, moment1 + first, roots + first);
        }
        for (uint64_t b = 0; b < batch; b++) {
            uint64_t first = at + b * LH_ADAM_STATES_BLOCK;
            const struct lh_adam_moments block = block_of(moments, first);

            if (inverses[b].root < 0)
                ENCODE_REF(&block, moment1 + first, roots + first, LH_ADAM_STATES_BLOCK);
            else
                block_encode(&block, inverses[b], moment1 + first, roots + first);
        }
    }
}

#endif
