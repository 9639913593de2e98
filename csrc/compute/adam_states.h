/*
 * The formats in which moments are stored between steps.
 *
 * An update decodes the moments to fp32, applies the rule in fp32, and encodes the results: there
 * is one definition of a rule, whatever the format. Masters are exact in every format. Bytes that a
 * step by AdamW reads and writes per trained bf16 parameter, gradient included:
 *
 *      F32     26          BF16    18          8BIT    14.125
 *
 * [Note: Blocks of moments] BF16 and 8BIT are processed in blocks of LH_ADAM_STATES_BLOCK elements,
 * counted from the beginning of the unit. Chunks and parameters begin at block boundaries
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
 * Thread: pure functions over the caller's memory. The default floating-point environment is
 * required.
 */
#ifndef LH_COMPUTE_ADAM_STATES_H
#define LH_COMPUTE_ADAM_STATES_H

#include "base/base.h"

#define LH_ADAM_STATES_BLOCK 64
/* Elements whose scales have one checksum. */
#define LH_ADAM_SCALES_ELEMENTS (UINT64_C(1) << 20)

enum lh_adam_states {
    LH_ADAM_STATES_F32 = 0,
    LH_ADAM_STATES_BF16,
    LH_ADAM_STATES_8BIT,
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
    void *moment1;                 /* BF16: uint16_t; 8BIT: int8_t; NULL: the rule has none */
    void *moment2;                 /* BF16: uint16_t; 8BIT: uint8_t; NULL: likewise */
    struct lh_adam_scales *scales; /* 8BIT: one for each block; otherwise NULL */
};

/* Bytes of one moment per element. */
static inline uint64_t lh_adam_moment_bytes(enum lh_adam_states states)
{
    return states == LH_ADAM_STATES_F32 ? 4 : states == LH_ADAM_STATES_BF16 ? 2 : 1;
}

/* The stored moments from an element on, which is a multiple of LH_ADAM_STATES_BLOCK. */
static inline struct lh_adam_moments lh_adam_moments_from(const struct lh_adam_moments *moments,
                                                          uint64_t first)
{
    const uint64_t bytes = first * lh_adam_moment_bytes(moments->states);

    return (struct lh_adam_moments){
        .states = moments->states,
        .moment1 = moments->moment1 ? (char *)moments->moment1 + bytes : NULL,
        .moment2 = moments->moment2 ? (char *)moments->moment2 + bytes : NULL,
        .scales = moments->scales ? moments->scales + first / LH_ADAM_STATES_BLOCK : NULL,
    };
}

/* Bytes of the scales of elements, the last block of which may be incomplete. */
static inline uint64_t lh_adam_scale_bytes(enum lh_adam_states states, uint64_t elements)
{
    return states == LH_ADAM_STATES_8BIT
               ? lh_div_ceil(elements, LH_ADAM_STATES_BLOCK) * sizeof(struct lh_adam_scales)
               : 0;
}

struct lh_adam_states_ops; /* adam_kernels.h */

/*
 * Convert count elements, a multiple of LH_ADAM_STATES_BLOCK, to fp32. ops NULL: the best. Here and
 * in lh_adam_states_encode(), a moment that a rule lacks is NULL in both forms, and its scales are
 * 0.
 */
void lh_adam_states_decode(const struct lh_adam_states_ops *ops,
                           const struct lh_adam_moments *moments, float *moment1, float *moment2,
                           uint64_t count);

/* Generate the random words of BF16's elements, as lh_adam_states_encode() does; at most 256. */
void lh_adam_states_words(const struct lh_adam_states_ops *ops, uint32_t *words, uint64_t first,
                          uint64_t count, const struct lh_adam_random *random);

/* Replace second moments by what lh_adam_states_encode() expects: for 8BIT, their roots. */
void lh_adam_states_root(enum lh_adam_states states, float *moment2, uint64_t count);

/*
 * Convert fp32 moments to their stored format. first: the element of the parameter at which the
 * arrays begin, a multiple of LH_ADAM_STATES_BLOCK like count. For 8BIT, moment2 has the roots of
 * the second moments, which an update computes anyway. The fp32 arrays are garbage afterwards.
 */
void lh_adam_states_encode(const struct lh_adam_states_ops *ops,
                           const struct lh_adam_moments *moments, float *moment1, float *moment2,
                           uint64_t first, uint64_t count, const struct lh_adam_random *random);

#endif
