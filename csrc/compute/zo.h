/*
 * Zeroth-order training: the random direction z, and the passes over parameters that use it.
 *
 * Source: ZO2 alg. 1 (MeZO). A step moves the parameters by eps z, by -2 eps z and by eps z again,
 * takes a loss between, and then goes by -lr g z, all with the same z. Nothing keeps z: whoever
 * needs it makes it again.
 *
 * [Note: Counters] z is a function of where it is used, so there is no state of a generator to keep
 * or to replay. Element i of a parameter has the word i % 64 / 16 that Philox 4x32-10 (Salmon and
 * others, 2011) makes of the counter 16 (i / 64) + i % 16: sixteen neighbours come from sixteen
 * counters, which is how vectors are filled without a shuffle. The 128 bits of a counter are
 *
 *      32 low bits of it | 16 high bits, 16 of the sample | the parameter | the step
 *
 * and the key is the seed. Words 0 and 1 make z of words 0 and 1, words 2 and 3 of the others, by
 * Box and Muller: z = sqrt(-2 ln U) cos(2 pi V), and its sine. U has 24 bits, so |z| < 5.77.
 * Logarithm, sine and cosine are polynomials (errors below 1e-6) of additions and multiplications
 * that round one by one, never fused: a CPU, a GPU and torch give the same bits.
 *
 * [Note: Kept formats] A parameter may be kept in a narrow format between steps (its state), while
 * all arithmetic is in fp32 and what computation reads (values) is of another format. A state moves
 * by less than the distance of two numbers of its format, so that nearest ones would not move at
 * all: LH_ZO_OP_ROUND rounds at random instead, to the number below with the probability that keeps
 * the mean. Its 32 bits are the element's word of a stream of its own, LH_ZO_SAMPLE_ROUND, so that
 * every machine makes the same; a number that the format has stays as it is.
 *
 * Thread: any. The caller's floating-point environment does not show, and is left as it was.
 */
#ifndef LH_COMPUTE_ZO_H
#define LH_COMPUTE_ZO_H

#include "base/base.h"

#define LH_ZO_ROUND_COUNT 10
#define LH_ZO_SAMPLE_COUNT_MAX 65536
#define LH_ZO_SAMPLE_ROUND 65535 /* words of LH_ZO_OP_ROUND; no z is of it */
/* Elements of a parameter: counters have 48 bits. */
#define LH_ZO_ELEMENT_COUNT_MAX (UINT64_C(1) << 50)

/* The z of one parameter in one step. */
struct lh_zo_stream {
    uint64_t seed;
    uint32_t sample; /* of a step that takes several; below LH_ZO_SAMPLE_COUNT_MAX */
    uint32_t param;
    uint32_t step;
};

/* Of fp8 the one that is OCP's e4m3fn: no infinity, 448 at most, NaN is 0x7F. */
enum lh_zo_format {
    LH_ZO_FORMAT_F32 = 0,
    LH_ZO_FORMAT_BF16,
    LH_ZO_FORMAT_F16,
    LH_ZO_FORMAT_F8,
};

enum lh_zo_op_kind {
    LH_ZO_OP_PERTURB = 0, /* p + scale z */
    LH_ZO_OP_UPDATE,      /* p - lr (scale z + decay p); without decay p - lr (scale z) */
    LH_ZO_OP_DRAW,        /* z */
    /*
     * p, or the number of format next to it on the other side of it from 0, each with the
     * probability that makes p the mean; its largest one beyond that; a quiet NaN for each NaN.
     */
    LH_ZO_OP_ROUND,
};

/* Each operation that a formula above shows rounds to fp32. */
struct lh_zo_op {
    enum lh_zo_op_kind kind;
    bool is_same; /* z as in the op before, so that it is made once; no ROUND is either of them */
    struct lh_zo_stream stream;
    float scale;
    float lr;
    float decay;
    enum lh_zo_format format; /* of ROUND; fp32: p as it is */
};

/* The block of words for a counter: for tests against published vectors. */
void lh_zo_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words_out[4]);

/*
 * Apply ops in order to elements first to first + count of a parameter, which begin at source, and
 * put what comes of it at values (the same place, or one that does not overlap). The bits are the
 * same whatever ranges a parameter is cut into.
 */
void lh_zo_apply(float *values, const float *source, uint64_t first, uint64_t count,
                 const struct lh_zo_op *ops, uint32_t op_count);

/* What is kept of elements in a row, and what computation reads of them; they do not overlap. */
struct lh_zo_kept {
    void *state;
    enum lh_zo_format state_format;
    void *values;
    enum lh_zo_format value_format; /* not F8 */
};

/* Bytes of an element. */
uint64_t lh_zo_format_bytes(enum lh_zo_format format);

/*
 * Apply ops in order to what state holds of elements first to first + count, which is where kept
 * points. What comes of them all goes to values, rounded to nearest, ties to even; what comes of
 * those up to the last ROUND, whose formats are the state's, goes to state: it is the same as
 * before where there is none. The bits are the same whatever ranges a parameter is cut into.
 */
void lh_zo_lead(const struct lh_zo_kept *kept, uint64_t first, uint64_t count,
                const struct lh_zo_op *ops, uint32_t op_count);

struct lh_zo_kernel {
    const char *name; /* "avx512", "avx2", "neon", "ref" */
    /* first and count are multiples of 64. */
    void (*run)(float *values, const float *source, uint64_t first, uint64_t count,
                const struct lh_zo_op *ops, uint32_t op_count);
    /* Elements of format, which is not F32, as numbers of fp32. */
    void (*widen)(float *values, const void *kept, enum lh_zo_format format, uint64_t count);
    /* Numbers that format has, or the NaN of LH_ZO_OP_ROUND. */
    void (*narrow)(void *kept, const float *values, enum lh_zo_format format, uint64_t count);
    /* Any numbers, rounded to BF16 or F16 as lh_cast_is_of() has them (cast.h). */
    void (*cast)(void *cast, const float *values, enum lh_zo_format format, uint64_t count);
};

/* The kernels this machine can run, best first; the count is returned. */
int lh_zo_kernels(const struct lh_zo_kernel **kernels_out);
/* The same by a kernel of lh_zo_kernels(), for tests and benchmarks. */
void lh_zo_apply_by(const struct lh_zo_kernel *kernel, float *values, const float *source,
                    uint64_t first, uint64_t count, const struct lh_zo_op *ops, uint32_t op_count);
void lh_zo_lead_by(const struct lh_zo_kernel *kernel, const struct lh_zo_kept *kept, uint64_t first,
                   uint64_t count, const struct lh_zo_op *ops, uint32_t op_count);

#endif
