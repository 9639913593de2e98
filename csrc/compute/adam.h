/*
 * AdamW on the CPU, in one pass over memory.
 *
 * The update rule is that of torch.optim.AdamW, in fp32, with explicit fused multiply-adds. All
 * scalars are computed in double on the host, once per step and parameter, then rounded to float:
 *
 *      g  = gradient * gradient_scale         (unscale and clip, one multiplication; exact when 1)
 *      m  = fma(g - m, 1 - beta1, m)
 *      v  = fma(v, beta2, (g * (1 - beta2)) * g)
 *      d  = fma(sqrt(v), 1 / bias2_sqrt, eps)
 *      p  = fma(-step_size, m / d, p * decay)
 *
 * with decay = 1 - lr * weight_decay and step_size = lr / bias1. The square root and the division
 * are those of IEEE 754, never approximations. sqrt(v) is multiplied by a reciprocal computed in
 * double instead of being divided by bias2_sqrt. The result is equally exact, whereas a second
 * division raised the time per element in cache from 0.32 to 0.51 ns (one Zen 4 core, AVX-512),
 * close to the limit set by fast memory.
 *
 * rule_ref.c is the definition; every SIMD kernel matches it bit for bit, on any input including
 * NaN, infinity and denormals (no flush to zero). A NaN that an update writes to p, m or v is
 * 0x7FC00000, whatever NaN or operation it came from: which operand's payload survives is the only
 * respect in which IEEE arithmetic differs between instruction sets.
 *
 * [Note: Gradients that are not finite] With a NaN or an infinity as its gradient, p becomes NaN:
 * an infinite g makes m and sqrt(v) infinite, whose quotient is NaN. Every kernel compares p with
 * itself to settle NaNs, so it also reports whether there was one: an instruction for each register
 * of p, where the update waits for memory.
 *
 * [Note: 12P] A bf16 parameter is stored as P16, its fp32 master P32 rounded to nearest with ties
 * away from zero, and the difference of their bit patterns:
 *
 *      residual = bits(P32) - (bits(P16) << 16)
 *
 * Ties away from zero keep the residual in [-32768, 32767], so 16 bits hold it (with ties to even,
 * a difference of +32768 would occur) and the pair restores P32 exactly: 4 bytes instead of 6.
 * Rounding could carry a NaN's bit pattern into infinity or past it, so a NaN master becomes the
 * quiet NaN 0x7FC00000 (with its sign) and residual 0. Infinity is exact. A finite master at or
 * above 0x7F7F8000 rounds to infinity in P16, as bf16 rounding does; the residual still restores
 * it.
 *
 * [Note: 14P] fp16 has three exponent bits fewer than fp32, so no 16-bit residual completes its P16
 * to the exact master. An fp16 parameter has its fp32 master in place of the residual (6 bytes,
 * where bf16 has 4), and P16 is the master rounded to nearest with ties to even: infinity for
 * magnitudes from 65520 on, 0x7E00 for NaN. An update reads the master, but not P16.
 *
 * Thread: pure functions over the caller's memory.
 * Source: LoHan IV-C (the optimizer as the gradient's handler); the rule: Loshchilov and Hutter,
 *         Decoupled Weight Decay.
 */
#ifndef LH_COMPUTE_ADAM_H
#define LH_COMPUTE_ADAM_H

#include <stdbool.h>

#include "base/dtype.h"
#include "compute/adam_states.h"
#include "compute/factor.h"
#include "compute/rule.h"

/*
 * The number of elements per tile where checksums are computed separately from the update: all
 * arrays of a tile, at most 72 KiB, stay in the second-level cache until the second checksum.
 */
#define LH_ADAM_TILE_ELEMENTS 4096

struct lh_adam_scalars {
    float gradient_scale;
    float beta1_rest; /* 1 - beta1 */
    float beta2;
    float beta2_rest;         /* 1 - beta2 */
    float bias2_sqrt_inverse; /* 1 / sqrt(1 - beta2^step) */
    float eps;
    float step_size;    /* lr / (1 - beta1^step) */
    float decay;        /* 1 - lr * weight_decay */
    float average_rest; /* 1 - decay of the average of parameters; kernels do not use it */
    /* Of other rules than AdamW (rule.h): */
    float beta1;
    float coupled; /* weight decay that is added to the gradient */
};

/* What the numbers mean under other rules is in rule.h. */
struct lh_adam_hyper {
    double lr, beta1, beta2, eps, weight_decay;
    double average_rest; /* as in struct lh_adam_scalars; 1: the average becomes the parameter */
};

/* Bytes per element stored in addition to P16: [Note: 12P], [Note: 14P], or 0. */
static inline uint64_t lh_adam_residual_bytes(enum lh_dtype param_dtype)
{
    switch (param_dtype) {
    case LH_DTYPE_BF16:
        return sizeof(int16_t);
    case LH_DTYPE_F16:
        return sizeof(float);
    default:
        return 0;
    }
}

/* Bytes of what is stored for each block of LH_ADAM_STATES_BLOCK elements: scales or rows. */
static inline uint64_t lh_adam_block_bytes(enum lh_rule rule, enum lh_adam_states states)
{
    if (lh_rules[rule].has_rows)
        return sizeof(struct lh_adam_rows);
    return lh_adam_has_scales(states) ? sizeof(struct lh_adam_scales) : 0;
}

/* Compute the scalars of a step (1, 2, ...). Source: torch.optim.AdamW, single-tensor form. */
struct lh_adam_scalars lh_adam_scalars_make(const struct lh_adam_hyper *hyper, uint64_t step,
                                            double gradient_scale);

/*
 * A run of elements with one set of scalars. The arrays do not overlap; their alignment and the
 * count are arbitrary.
 */
struct lh_adam_run {
    void *param;    /* float, or bits of bf16 or fp16 */
    void *residual; /* bf16: int16_t; fp16: the master, float; fp32: NULL */
    float *moment1; /* NULL: the rule has none, as moment2 */
    float *moment2;
    const void *gradient; /* like param, but of type gradient_dtype */
    uint64_t count;
    enum lh_dtype param_dtype;    /* LH_DTYPE_F32, _BF16 or _F16 */
    enum lh_dtype gradient_dtype; /* any of the same three */
    bool *has_nan;  /* becomes true if an updated parameter is NaN; NULL: nobody asks */
    bool has_roots; /* moment2 receives the roots of second moments, for states with scales */
};

typedef void (*lh_adam_fn)(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars);

/* The byte streams of an update that have checksums: those read, then those written. */
enum lh_adam_stream {
    LH_ADAM_STREAM_RESIDUAL_READ,
    LH_ADAM_STREAM_MOMENT1_READ,
    LH_ADAM_STREAM_MOMENT2_READ,
    LH_ADAM_STREAM_PARAM,
    LH_ADAM_STREAM_RESIDUAL,
    LH_ADAM_STREAM_MOMENT1,
    LH_ADAM_STREAM_MOMENT2,
    LH_ADAM_STREAM_COUNT
};

/* A multiple of this many elements fills whole 64-byte words of every array. */
#define LH_ADAM_FOLD_ELEMENTS 32

/*
 * Like lh_adam_fn; also returns each stream's lh_crc32c(), continued from UINT32_MAX. count is a
 * multiple of LH_ADAM_FOLD_ELEMENTS. See [Note: folds] in adam_kernels.h.
 */
typedef void (*lh_adam_checking_fn)(const struct lh_adam_run *run,
                                    const struct lh_adam_scalars *scalars,
                                    uint32_t crcs_out[LH_ADAM_STREAM_COUNT]);

/*
 * An update of whole blocks whose moments are not in fp32, without a pass that decodes them. BF16:
 * the stored moments are updated, with a random word for each element; those of run are not used.
 * 8BIT and 4BIT: moment1 and moment2 of run receive the new moments and roots, which are not yet
 * encoded.
 */
typedef void (*lh_adam_stored_fn)(const struct lh_adam_run *run,
                                  const struct lh_adam_scalars *scalars,
                                  const struct lh_adam_moments *stored, const uint32_t *random);

struct lh_adam_kernel {
    /* "avx512", "avx2", each also with "_pclmul" and "_tiles"; "neon", "neon_tiles"; "ref" */
    const char *name;
    /* All functions are by enum lh_rule. */
    const lh_adam_fn *run;
    const lh_adam_checking_fn *run_checking; /* NULL: checksums are computed tile by tile */
    const lh_adam_stored_fn *run_stored;     /* NULL: decode before run, encode after it */
    const struct lh_adam_states_ops *states;
};

/* The kernels this machine can run, best first ("ref" last). For tests, benchmarks and doctor. */
int lh_adam_kernels(const struct lh_adam_kernel **kernels_out);

/* Update by AdamW with the best kernel, in the default floating-point environment. */
void lh_adam_update(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars);

/*
 * Read and write the bytes that an update would read and write, with almost no arithmetic: the
 * upper bound of an update's speed, for benchmarks and doctor. The arrays are garbage afterwards.
 * Moments that are NULL are left out, as are scales. stored: moments in fewer bits in place of the
 * run's, or NULL. Returns a sum over the gradient, so that the compiler cannot remove the reads.
 */
uint64_t lh_adam_stream(const struct lh_adam_run *run, const struct lh_adam_moments *stored);

/* Convert fp32 masters to P16 + residual, and back, as in [Note: 12P]. */
void lh_adam_split(const float *master, uint16_t *param, int16_t *residual, uint64_t count);
void lh_adam_join(const uint16_t *param, const int16_t *residual, float *master, uint64_t count);

/*
 * Move count averages towards values, the fp32 masters e and p of an exponential moving average:
 *
 *      e = fma(rest, p - e, e)         if |rest| < 0.5
 *      e = fma(rest - 1, p - e, p)     otherwise, and p itself if rest is 1
 *
 * The weight of the old average is 1 - rest. A NaN becomes LH_ADAM_NAN_BITS.
 * Source: torch._foreach_lerp_ (torch.optim.swa_utils.get_ema_multi_avg_fn) on a machine with FMA.
 */
void lh_adam_average(float *average, const float *values, uint64_t count, float rest);

/* The part of a chunk that one gradient covers. Elements outside of all segments do not change. */
struct lh_adam_segment {
    uint64_t first; /* an element of the chunk */
    uint64_t count;
    /* Its first value belongs to element `first`. NULL: see zeros. */
    const void *gradient;
    enum lh_dtype gradient_dtype;
    struct lh_adam_scalars scalars;
    /* Without a gradient: updates with gradients of zeros, one after another. */
    const struct lh_adam_scalars *zeros;
    uint32_t zero_count;
    bool averages_only;   /* the zeros are no updates: averages take the steps */
    uint64_t param_first; /* the element of the parameter at `first`; BF16, rows and factors */
    /* Rules with rows: the sums of squares of the parameter's rows, and their elements. */
    const double *row_sums;
    uint64_t row_elements;
    struct lh_factors factors;    /* [Note: Factors] in factor.h; values NULL: the rule has none */
    float *update;                /* Muon: its update, at `first`; it is only read */
    struct lh_adam_random random; /* BF16 only; with zeros, of the first of these steps in a row */
};

/*
 * A chunk: consecutive elements of one bucket, and their checksums. One checksum covers
 * LH_CHECKSUM_BYTES of one array, counted from the start of the array (a chunk starts on such a
 * boundary in every array); the last may cover fewer. For scales, it covers
 * LH_ADAM_SCALES_ELEMENTS elements.
 *
 * If states is not F32 or the rule has rows, a chunk consists of blocks, segments begin at blocks,
 * and no two of them share one: [Note: Blocks of moments] in adam_states.h.
 */
struct lh_adam_chunk {
    void *param;
    void *residual; /* as in struct lh_adam_run */
    void *moment1;  /* float, or as in struct lh_adam_moments; NULL: the rule has none */
    void *moment2;
    struct lh_adam_scales *scales; /* 8BIT and 4BIT only */
    struct lh_adam_rows *rows;     /* NULL: the rule has none; they have the checksums of scales */
    float *average; /* of the masters, updated after them as lh_adam_average(); NULL: none */
    uint64_t count; /* elements */
    enum lh_dtype param_dtype;
    enum lh_adam_states states;
    enum lh_rule rule;
    const struct lh_adam_segment *segments; /* sorted by first, disjoint */
    uint32_t segment_count;
    /* The expected checksums of the bytes read; NULL: the array is not checked. */
    const uint32_t *residual_expected;
    const uint32_t *moment1_expected;
    const uint32_t *moment2_expected;
    const uint32_t *scales_expected;
    const uint32_t *average_expected;
    /* Where the checksums of the bytes written are stored; NULL: they are not computed. */
    uint32_t *param_checksums;
    uint32_t *residual_checksums;
    uint32_t *moment1_checksums;
    uint32_t *moment2_checksums;
    uint32_t *scales_checksums;
    uint32_t *average_checksums;
    /* Receives the first segment with a parameter that the update has made NaN, or NONE. */
    uint32_t *nan_segment; /* NULL: nobody asks */
};

#define LH_ADAM_SEGMENT_NONE UINT32_MAX

enum lh_adam_array {
    LH_ADAM_ARRAY_NONE,
    LH_ADAM_ARRAY_RESIDUAL,
    LH_ADAM_ARRAY_MOMENT1,
    LH_ADAM_ARRAY_MOMENT2,
    LH_ADAM_ARRAY_SCALES,
    LH_ADAM_ARRAY_AVERAGE
};

struct lh_adam_mismatch {
    enum lh_adam_array array;
    uint64_t block; /* index of the checksum in the chunk */
    uint32_t expected;
    uint32_t actual;
};

/*
 * Update a chunk in one pass: check what was read, update, and compute checksums of what is to be
 * written. Returns 0, or -EILSEQ and the first mismatch (in the block that ends first; among blocks
 * that end together, the order is residual, moment1, moment2, average, scales). After a mismatch,
 * the chunk's bytes are garbage and must not be written.
 *
 * kernel: one of lh_adam_kernels(), for tests and benchmarks; NULL: the best one.
 */
int lh_adam_chunk_update(const struct lh_adam_kernel *kernel, const struct lh_adam_chunk *chunk,
                         struct lh_adam_mismatch *mismatch_out);

#endif
