/*
 * The kernels that lh_adam_kernels() lists, one file for each instruction set. Only csrc/compute
 * includes this header; other code uses adam.h, which selects what the machine can run.
 */
#ifndef LH_COMPUTE_ADAM_KERNELS_H
#define LH_COMPUTE_ADAM_KERNELS_H

#include "base/assert.h"
#include "compute/adam.h"

/*
 * [Note: folds] A checksum is computed while the bytes are in registers: each n-bit register w of a
 * stream is folded into an n-bit state, state = state * x^n + w (modulo the CRC's polynomial).
 * Starting from 0, the final state has the remainder of the whole stream. Seven carry-less chains
 * take less time per iteration than the square root and the division, whereas a second pass over a
 * tile in cache would add all of its own time.
 */

/* The NaN that every kernel writes: quiet, positive, no payload. */
#define LH_ADAM_NAN_BITS UINT32_C(0x7FC00000)

/*
 * How checksums are computed. NARROW needs no VPCLMULQDQ, and WIDE is the only form of a machine
 * that has no other.
 */
enum lh_adam_folding { LH_ADAM_FOLDING_NONE, LH_ADAM_FOLDING_WIDE, LH_ADAM_FOLDING_NARROW };

/* Kernels by enum lh_rule: the definition, which runs on any machine, and rule_body.h. */
extern const lh_adam_fn lh_rule_ref[LH_RULE_COUNT];
#if defined(__x86_64__)
/* Need AVX2, FMA and F16C; _pclmul needs PCLMULQDQ as well, _folding also VPCLMULQDQ. */
extern const lh_adam_fn lh_rule_avx2_run[LH_RULE_COUNT];
extern const lh_adam_checking_fn lh_rule_avx2_pclmul[LH_RULE_COUNT];
extern const lh_adam_checking_fn lh_rule_avx2_folding[LH_RULE_COUNT];
extern const lh_adam_stored_fn lh_rule_avx2_stored[LH_RULE_COUNT];
/* Need AVX-512 F, BW, VL and DQ; the other two as with AVX2. */
extern const lh_adam_fn lh_rule_avx512_run[LH_RULE_COUNT];
extern const lh_adam_checking_fn lh_rule_avx512_pclmul[LH_RULE_COUNT];
extern const lh_adam_checking_fn lh_rule_avx512_folding[LH_RULE_COUNT];
extern const lh_adam_stored_fn lh_rule_avx512_stored[LH_RULE_COUNT];
#elif defined(__aarch64__)
/* Run on every ARMv8-A; _folding needs CRC32 and PMULL as well. */
extern const lh_adam_fn lh_rule_neon_run[LH_RULE_COUNT];
extern const lh_adam_checking_fn lh_rule_neon_folding[LH_RULE_COUNT];
extern const lh_adam_stored_fn lh_rule_neon_stored[LH_RULE_COUNT];
#endif

/* lh_adam_average() for a part of a chunk, in the default floating-point environment. */
void lh_adam_average_ref(float *average, const float *values, uint64_t count, float rest);
#if defined(__x86_64__)
/* Needs AVX2 and FMA. */
void lh_adam_average_avx2(float *average, const float *values, uint64_t count, float rest);
#endif

/* The conversions of moments that go with the kernels (adam_8bit.h). */
extern const struct lh_adam_states_ops lh_adam_states_ref;
#if defined(__x86_64__)
extern const struct lh_adam_states_ops lh_adam_states_avx2;
extern const struct lh_adam_states_ops lh_adam_states_avx512;
#elif defined(__aarch64__)
extern const struct lh_adam_states_ops lh_adam_states_neon;
#endif

/* The part of a run that starts at element first. */
static inline struct lh_adam_run lh_adam_run_from(const struct lh_adam_run *run, uint64_t first)
{
    struct lh_adam_run part = *run;

    LH_ASSERT(run->gradient);
    part.param = (char *)run->param + first * lh_dtype_bytes(run->param_dtype);
    part.residual = run->residual
                        ? (char *)run->residual + first * lh_adam_residual_bytes(run->param_dtype)
                        : NULL;
    part.moment1 = run->moment1 ? run->moment1 + first : NULL;
    part.moment2 = run->moment2 ? run->moment2 + first : NULL;
    part.gradient = (const char *)run->gradient + first * lh_dtype_bytes(run->gradient_dtype);
    part.count = run->count - first;
    return part;
}

#endif
