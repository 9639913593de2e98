/*
 * Sums of gradients over several backwards, in fp32: element by element, in the order in which the
 * gradients arrive, so that fp32 sums match torch's own p.grad bit for bit.
 *
 * Pure. Thread: any.
 */
#ifndef LH_COMPUTE_SUM_H
#define LH_COMPUTE_SUM_H

#include "base/dtype.h"

/* Set sum = gradient, for the first gradient (F32, BF16 or F16). Zeros keep their signs. */
void lh_sum_start(float *sum, const void *gradient, enum lh_dtype dtype, uint64_t count);
/* Add a later gradient to sum. */
void lh_sum_add(float *sum, const void *gradient, enum lh_dtype dtype, uint64_t count);

#endif
