/*
 * The kernels of lh_cast_is_of(), one file for each instruction set. Only csrc/compute includes
 * this header.
 */
#ifndef LH_COMPUTE_CAST_KERNELS_H
#define LH_COMPUTE_CAST_KERNELS_H

#include "base/base.h"

/* Elements per call: enough to amortize the call, few enough to stop soon after a difference. */
#define LH_CAST_BATCH 256

/*
 * Whether any of LH_CAST_BATCH elements of cast differs from the value rounded to nearest, ties to
 * even (a NaN becomes 0x7FC0 in bf16, and 0x7E00 with the NaN's sign in fp16). The caller has set
 * the default floating-point environment.
 */
typedef bool (*lh_cast_differs_fn)(const uint16_t *cast, const float *values);

#if defined(__x86_64__)
/* These two need AVX2 and F16C. */
bool lh_cast_bf16_differs_avx2(const uint16_t *cast, const float *values);
bool lh_cast_half_differs_avx2(const uint16_t *cast, const float *values);
#elif defined(__aarch64__)
bool lh_cast_bf16_differs_neon(const uint16_t *cast, const float *values);
bool lh_cast_half_differs_neon(const uint16_t *cast, const float *values);
#endif

#endif
