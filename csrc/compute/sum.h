/*
 * Sums of gradients over several backwards, in fp32: element by element, in the order in which the
 * gradients come, so that fp32 sums have the bits of torch's own p.grad.
 *
 * Pure. Thread: any.
 */
#ifndef LH_COMPUTE_SUM_H
#define LH_COMPUTE_SUM_H

#include "base/dtype.h"

/* sum = gradient (count elements, F32, BF16 or F16): the first of them; signs of zeros stay. */
void lh_sum_start(float *sum, const void *gradient, enum lh_dtype dtype, uint64_t count);
/* sum += gradient */
void lh_sum_add(float *sum, const void *gradient, enum lh_dtype dtype, uint64_t count);

#endif
