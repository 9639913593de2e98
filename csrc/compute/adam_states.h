/*
 * The formats in which moments are stored between steps.
 *
 * An update decodes the moments to fp32, applies the rule in fp32, and encodes the results: there
 * is one definition of a rule, whatever the format. Masters are exact in every format. Bytes that a
 * step by AdamW reads and writes per trained bf16 parameter, gradient included:
 *
 *      F32     26          BF16    18          8BIT    14.125          4BIT    12.125
 *
 * [Note: Blocks of moments] All formats but F32 are processed in blocks of LH_ADAM_STATES_BLOCK
 * elements, counted from the beginning of the unit. Chunks and parameters begin at block boundaries
 * (LH_ENGINE_PARAM_ALIGN), and what follows a parameter in its last block is padding, whose moments
 * are 0. So no block contains elements of two parameters or two chunks: a parameter without a
 * gradient is not touched, and the bits do not depend on chunks, segments or threads.
 *
 * [Note: Moments in bf16] Moments are rounded stochastically, like the kept parameters of zeroth-
 * order training ([Note: Kept formats] in zo.h). Rounding to nearest would stop the decay of the
 * second moment: a step changes it by a thousandth, and bf16 has 8 bits. The random bits are the
 * word of [Note: Counters] in zo.h for (seed, sample, param, step, element of it): its upper
 * half for the first moment, its lower half for the second. Magnitudes above the largest bf16
 * number become that number. The place of a parameter in a unit has no influence.
 *
 * [Note: Moments in 8 bits] A block has a scale for each moment; an element has one byte for each:
 *
 *      s = scale(max |m|)          q = sign(m) code(247 |m| / s)    m = sign(q) value(|q|) s / 247
 *      s = scale(max sqrt(v))      q = round(254 sqrt(v) / s)        v = (q s / 254)^2
 *
 * where value(16 e + f) = (1 + f / 16) 2^e - 1 for e = 0 to 7 and f = 0 to 15, and code(x) is the
 * nearest code (the highest bits of x + 1 as a float): the companding of G.711's mu-law. Its codes
 * are dense near 0, where most of a block's values are, and it needs neither a root nor a division.
 * The root of v is a part of the update. q is at least 1 for v > 0, so that no positive second
 * moment becomes 0, which would make the next update of that element too large. The codes -128 of m
 * and 255 of v are NaN, whose block is otherwise encoded as if that element were 0. A scale has 16
 * bits without a sign: fp16 with 6 exponent bits, rounded to nearest. Its 10 fraction bits are
 * needed, because a step may shrink the root of the second moment by as little as 1 / 2000; with
 * the range of fp16 itself, down to 6e-8, the moments of small gradients would be 0. Scales below
 * 2^-43 become 0, and those above the largest (2^21 - 2^10) become it. Encoding what was decoded
 * gives the same bytes.
 *
 * Blocks, companding and scales are those of FlashOptim (arXiv 2602.23349) and of bitsandbytes'
 * 8-bit optimizers; the formulas are lohan's.
 *
 * [Note: Moments in 4 bits] The codes of an element's two moments share a byte, that of the first
 * moment in its low half. Scales are those of 8 bits.
 *
 *      q = sign(m) code(11 |m| / s)                m = sign(q) value(|q|) s / 11
 *      q = max(1, round(16 sqrt(v) / s)) - 1       v = ((q + 1) s / 16)^2
 *
 * where value(2 e + f) = (1 + f / 2) 2^e - 1 for e = 0 to 3 and f = 0, 1: the companding of 8 bits
 * with one bit of the fraction. No code of v is 0, except in a block of zeros: an element whose
 * second moment became 0 would make too large a step. The code -8 of m is NaN. There is no such
 * code of v: a NaN is encoded as 0, while the parameter is NaN and stays so ([Note: Gradients that
 * are not finite] in adam.h). A rule with one moment has no 4 bits, because it would fill half of
 * each byte.
 *
 * That v has a linear map without 0, and m one that is denser near 0, is what Li et al. 2023,
 * Memory Efficient Optimizers with 4-bit States, found necessary. Theirs are linear in v, which has
 * no root below s / 4, and dynamic exponents, which reach down to 1 / 180 of the largest m; in
 * blocks of 128 elements with a scale of 32 bits, which take as many bytes as these of 64 with one
 * of 16. docs/low-precision-states.md has the losses with both.
 *
 * Thread: pure functions over the caller's memory. The default floating-point environment is
 * required.
 */
#ifndef LH_COMPUTE_ADAM_STATES_H
#define LH_COMPUTE_ADAM_STATES_H

#include <stdbool.h>

#include "base/base.h"

#define LH_ADAM_STATES_BLOCK 64
/* Elements whose scales have one checksum. */
#define LH_ADAM_SCALES_ELEMENTS (UINT64_C(1) << 20)

enum lh_adam_states {
    LH_ADAM_STATES_F32 = 0,
    LH_ADAM_STATES_BF16,
    LH_ADAM_STATES_8BIT,
    LH_ADAM_STATES_4BIT,
    LH_ADAM_STATES_COUNT
};

/* The scales of a block. */
struct lh_adam_scales {
    uint16_t moment1;
    uint16_t moment2;
};

/* The second moments of the rows of a block's first and last element ([Note: Second moments of
 * rows] in rule.h); rows have at least as many elements as a block, or are a whole parameter. */
struct lh_adam_rows {
    float first;
    float last;
};

/* The seed of all random bits: a run is reproducible, and its store needs no seed. */
#define LH_ADAM_SEED UINT64_C(0x6C6F68616E) /* "lohan" */

/* What determines the random bits of a parameter's update, in addition to the element. */
struct lh_adam_random {
    uint64_t seed;
    uint32_t param; /* a number that does not depend on how parameters are placed */
    uint32_t step;
};

/* The stored moments of consecutive blocks. */
struct lh_adam_moments {
    enum lh_adam_states states;    /* not F32 */
    void *moment1;                 /* BF16: uint16_t; 8BIT: int8_t; NULL: the rule has none;
                                      4BIT: uint8_t, both moments */
    void *moment2;                 /* BF16: uint16_t; 8BIT: uint8_t; NULL: likewise, or 4BIT */
    struct lh_adam_scales *scales; /* 8BIT and 4BIT: one for each block; otherwise NULL */
};

/* Whether blocks have scales. */
static inline bool lh_adam_has_scales(enum lh_adam_states states)
{
    return states == LH_ADAM_STATES_8BIT || states == LH_ADAM_STATES_4BIT;
}

/* Bytes per element of the array of first moments; 4BIT: of both. */
static inline uint64_t lh_adam_moment1_bytes(enum lh_adam_states states)
{
    return states == LH_ADAM_STATES_F32 ? 4 : states == LH_ADAM_STATES_BF16 ? 2 : 1;
}

/* Bytes per element of the array of second moments; 0: the format has no such array. */
static inline uint64_t lh_adam_moment2_bytes(enum lh_adam_states states)
{
    return states == LH_ADAM_STATES_4BIT ? 0 : lh_adam_moment1_bytes(states);
}

/* The stored moments from an element on, which is a multiple of LH_ADAM_STATES_BLOCK. */
static inline struct lh_adam_moments lh_adam_moments_from(const struct lh_adam_moments *moments,
                                                          uint64_t first)
{
    const uint64_t bytes1 = first * lh_adam_moment1_bytes(moments->states);
    const uint64_t bytes2 = first * lh_adam_moment2_bytes(moments->states);

    return (struct lh_adam_moments){
        .states = moments->states,
        .moment1 = moments->moment1 ? (char *)moments->moment1 + bytes1 : NULL,
        .moment2 = moments->moment2 ? (char *)moments->moment2 + bytes2 : NULL,
        .scales = moments->scales ? moments->scales + first / LH_ADAM_STATES_BLOCK : NULL,
    };
}

/* Bytes of the scales of elements, the last block of which may be incomplete. */
static inline uint64_t lh_adam_scale_bytes(enum lh_adam_states states, uint64_t elements)
{
    return lh_adam_has_scales(states)
               ? lh_div_ceil(elements, LH_ADAM_STATES_BLOCK) * sizeof(struct lh_adam_scales)
               : 0;
}

struct lh_adam_states_ops; /* adam_kernels.h */

/*
 * Convert count elements, a multiple of LH_ADAM_STATES_BLOCK, to fp32. ops NULL: the best. Here and
 * in lh_adam_states_encode(), a moment that a rule lacks is NULL in both forms, and its scales are
 * 0; with 4BIT, there are both.
 */
void lh_adam_states_decode(const struct lh_adam_states_ops *ops,
                           const struct lh_adam_moments *moments, float *moment1, float *moment2,
                           uint64_t count);

/* Generate the random words of BF16's elements, as lh_adam_states_encode() does; at most 256. */
void lh_adam_states_words(const struct lh_adam_states_ops *ops, uint32_t *words, uint64_t first,
                          uint64_t count, const struct lh_adam_random *random);

/* Replace second moments by what lh_adam_states_encode() expects: their roots, with scales. */
void lh_adam_states_root(enum lh_adam_states states, float *moment2, uint64_t count);

/*
 * Convert fp32 moments to their stored format. first: the element of the parameter at which the
 * arrays begin, a multiple of LH_ADAM_STATES_BLOCK like count. If there are scales, moment2 has the
 * roots of the second moments, which an update computes anyway. The fp32 arrays are garbage
 * afterwards.
 */
void lh_adam_states_encode(const struct lh_adam_states_ops *ops,
                           const struct lh_adam_moments *moments, float *moment1, float *moment2,
                           uint64_t first, uint64_t count, const struct lh_adam_random *random);

#endif
