/*
 * Zeroth-order training: the random direction z, and the passes over parameters that use it.
 *
 * Source: ZO2 alg. 1 (MeZO). A step moves the parameters by eps z, by -2 eps z and by eps z again,
 * computes a loss after each of the first two moves, and finally moves by -lr g z, all with the
 * same z. z is never stored: it is regenerated wherever it is needed.
 *
 * [Note: Counters] z is a function of where it is used, so no generator state has to be stored or
 * replayed. Element i of a parameter uses word i % 64 / 16 that Philox 4x32-10 (Salmon and others,
 * 2011) generates from the counter 16 (i / 64) + i % 16: sixteen neighbors come from sixteen
 * counters, so that vectors are filled without a shuffle. Philox's input of 128 bits is
 *
 *      the counter's 32 low bits | its 16 high bits, 16 of the sample | the parameter | the step
 *
 * and its key is the seed. Elements with words 0 and 1 get their z from words 0 and 1, and elements
 * with words 2 and 3 from words 2 and 3, by the method of Box and Muller:
 * z = sqrt(-2 ln U) cos(2 pi V), and the same with the sine. U has 24 bits, so |z| < 5.77. The
 * logarithm, sine and cosine are polynomials (errors below 1e-6) of additions and multiplications
 * that are rounded individually, never fused: a CPU, a GPU and torch give the same bits.
 *
 * [Note: Kept formats] A parameter may be stored in a narrow format between steps (its state),
 * while all arithmetic is in fp32 and computation reads another format (its values). An update is
 * usually smaller than the distance between two numbers of the state's format, so that rounding to
 * nearest would discard it. LH_ZO_OP_ROUND rounds stochastically instead: to one of the two
 * adjacent numbers, with probabilities that preserve the mean. Its 32 random bits are the element's
 * word of a separate stream, LH_ZO_SAMPLE_ROUND, so that every machine uses the same bits. A number
 * that the format can represent is left unchanged.
 *
 * Thread: any. The caller's floating-point environment has no effect and is preserved.
 */
#ifndef LH_COMPUTE_ZO_H
#define LH_COMPUTE_ZO_H

#include "base/base.h"

#define LH_ZO_ROUND_COUNT 10
#define LH_ZO_SAMPLE_COUNT_MAX 65536
#define LH_ZO_SAMPLE_ROUND 65535 /* random bits of LH_ZO_OP_ROUND; not used for any z */
/* The maximum number of elements of a parameter: counters have 48 bits. */
#define LH_ZO_ELEMENT_COUNT_MAX (UINT64_C(1) << 50)

/* The z of one parameter in one step. */
struct lh_zo_stream {
    uint64_t seed;
    uint32_t sample; /* the sample's index in the step, below LH_ZO_SAMPLE_COUNT_MAX */
    uint32_t param;
    uint32_t step;
};

/* F8 is OCP's e4m3fn: no infinity, the largest number is 448, NaN is 0x7F. */
enum lh_zo_format {
    LH_ZO_FORMAT_F32 = 0,
    LH_ZO_FORMAT_BF16,
    LH_ZO_FORMAT_F16,
    LH_ZO_FORMAT_F8,
};

enum lh_zo_op_kind {
    LH_ZO_OP_PERTURB = 0, /* p + scale z */
    LH_ZO_OP_UPDATE,      /* p - lr (scale z + decay p); without decay, p - lr (scale z) */
    LH_ZO_OP_DRAW,        /* z */
    /*
     * One of the two numbers of format that enclose p, with probabilities that make p the mean; p
     * itself if format has it; the largest number of format if |p| is larger; a quiet NaN for NaN.
     */
    LH_ZO_OP_ROUND,
};

/* Each operation of the formulas above rounds to fp32. */
struct lh_zo_op {
    enum lh_zo_op_kind kind;
    bool is_same; /* reuse the z of the previous op; neither of these two ops may be a ROUND */
    struct lh_zo_stream stream;
    float scale;
    float lr;
    float decay;
    enum lh_zo_format format; /* the target of ROUND; F32 leaves p unchanged */
};

/* Generate the four words of a counter, for tests against published test vectors. */
void lh_zo_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words_out[4]);

/*
 * Apply ops in order to elements first to first + count of a parameter, which begin at source, and
 * store the results at values (the same address, or memory that does not overlap). The bits do not
 * depend on how a parameter is split into ranges.
 */
void lh_zo_apply(float *values, const float *source, uint64_t first, uint64_t count,
                 const struct lh_zo_op *ops, uint32_t op_count);

/* The stored state of consecutive elements, and the values that computation reads; no overlap. */
struct lh_zo_kept {
    void *state;
    enum lh_zo_format state_format;
    void *values;
    enum lh_zo_format value_format; /* any format but F8 */
};

/* Bytes per element. */
uint64_t lh_zo_format_bytes(enum lh_zo_format format);

/*
 * Apply ops in order to the state of elements first to first + count, which is where kept points.
 * The result of all ops goes to values, rounded to nearest, ties to even. The result up to the last
 * ROUND goes to state, which is unchanged if there is no ROUND; every ROUND has the state's format.
 * The bits do not depend on how a parameter is split into ranges.
 */
void lh_zo_lead(const struct lh_zo_kept *kept, uint64_t first, uint64_t count,
                const struct lh_zo_op *ops, uint32_t op_count);

struct lh_zo_kernel {
    const char *name; /* "avx512", "avx2", "neon", "ref" */
    /* first and count are multiples of 64. */
    void (*run)(float *values, const float *source, uint64_t first, uint64_t count,
                const struct lh_zo_op *ops, uint32_t op_count);
    /* Generate the random words of elements; first, count as in run; words aligned to 64 bytes. */
    void (*words)(uint32_t *words, uint64_t first, uint64_t count,
                  const struct lh_zo_stream *stream);
    /* Convert elements of format, which is not F32, to fp32. */
    void (*widen)(float *values, const void *kept, enum lh_zo_format format, uint64_t count);
    /* Convert to format: only numbers that it can represent, or the NaN of LH_ZO_OP_ROUND. */
    void (*narrow)(void *kept, const float *values, enum lh_zo_format format, uint64_t count);
    /* Round any numbers to BF16 or F16, as lh_cast_is_of() expects (cast.h). */
    void (*cast)(void *cast, const float *values, enum lh_zo_format format, uint64_t count);
};

/* The kernels that this machine can run, best first. Returns the number of kernels. */
int lh_zo_kernels(const struct lh_zo_kernel **kernels_out);
/* The same with a given kernel of lh_zo_kernels(), for tests and benchmarks. */
void lh_zo_apply_by(const struct lh_zo_kernel *kernel, float *values, const float *source,
                    uint64_t first, uint64_t count, const struct lh_zo_op *ops, uint32_t op_count);
void lh_zo_lead_by(const struct lh_zo_kernel *kernel, const struct lh_zo_kept *kept, uint64_t first,
                   uint64_t count, const struct lh_zo_op *ops, uint32_t op_count);

#endif
