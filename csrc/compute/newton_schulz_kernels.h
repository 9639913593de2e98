/* The kernels of newton_schulz.c. Only csrc/compute includes this header. */
#ifndef LH_COMPUTE_NEWTON_SCHULZ_KERNELS_H
#define LH_COMPUTE_NEWTON_SCHULZ_KERNELS_H

#include "compute/newton_schulz.h"

extern const struct lh_newton_schulz_kernel lh_newton_schulz_ref;
#if defined(__x86_64__)
extern const struct lh_newton_schulz_kernel lh_newton_schulz_avx2;
extern const struct lh_newton_schulz_kernel lh_newton_schulz_avx512;
#elif defined(__aarch64__)
extern const struct lh_newton_schulz_kernel lh_newton_schulz_neon;
#endif

#endif
