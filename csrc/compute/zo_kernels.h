/*
 * The kernels behind lh_zo_apply(), one file for each instruction set, and the numbers that they
 * share. Only csrc/compute includes this.
 */
#ifndef LH_COMPUTE_ZO_KERNELS_H
#define LH_COMPUTE_ZO_KERNELS_H

#include "compute/zo.h"

#define LH_ZO_BLOCK 64 /* elements of sixteen counters */
#define LH_ZO_COUNTERS 16
#define LH_ZO_WORDS 4

#define LH_ZO_MULTIPLIER_0 UINT32_C(0xD2511F53)
#define LH_ZO_MULTIPLIER_1 UINT32_C(0xCD9E8D57)
#define LH_ZO_WEYL_0 UINT32_C(0x9E3779B9)
#define LH_ZO_WEYL_1 UINT32_C(0xBB67AE85)

/*
 * ln(1 + f) = f - f^2 / 2 + f^3 L(f) for 1 + f in [sqrt(1/2), sqrt(2)); sin x = x + x^3 S(x^2) and
 * cos x = 1 - x^2 / 2 + x^4 C(x^2) for |x| <= pi / 4: least squares with weights that level the
 * error.
 */
#define LH_ZO_L0 0x1.5556d6p-2f
#define LH_ZO_L1 (-0x1.ffff0ep-3f)
#define LH_ZO_L2 0x1.98d24ap-3f
#define LH_ZO_L3 (-0x1.5489cp-3f)
#define LH_ZO_L4 0x1.32e6d4p-3f
#define LH_ZO_L5 (-0x1.1c270cp-3f)
#define LH_ZO_L6 0x1.45f9f2p-4f
#define LH_ZO_S0 (-0x1.555546p-3f)
#define LH_ZO_S1 0x1.110798p-7f
#define LH_ZO_S2 (-0x1.995e58p-13f)
#define LH_ZO_C0 0x1.5549f6p-5f
#define LH_ZO_C1 (-0x1.65dffp-10f)
#define LH_ZO_LN_2 0x1.62e43p-1f
#define LH_ZO_ROOT_HALF_BITS 0x3F3504F3   /* of sqrt(1/2) */
#define LH_ZO_ANGLE_SCALE 0x1.921fb6p-32f /* a quarter turn has 32 bits */

/* The definition; any machine. */
void lh_zo_ref(float *values, const float *source, uint64_t first, uint64_t count,
               const struct lh_zo_op *ops, uint32_t op_count);

#if defined(__x86_64__)
void lh_zo_avx2(float *values, const float *source, uint64_t first, uint64_t count,
                const struct lh_zo_op *ops, uint32_t op_count);
/* Needs AVX-512 F, BW, VL and DQ. */
void lh_zo_avx512(float *values, const float *source, uint64_t first, uint64_t count,
                  const struct lh_zo_op *ops, uint32_t op_count);
#elif defined(__aarch64__)
void lh_zo_neon(float *values, const float *source, uint64_t first, uint64_t count,
                const struct lh_zo_op *ops, uint32_t op_count);
#endif

#endif
