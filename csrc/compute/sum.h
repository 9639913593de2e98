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
/*
 * Add gradients one after the other; the first one starts the sum if is_first. The bits are those
 * of as many calls of the functions above, but the sum passes through memory only once.
 */
void lh_sum_add_all(float *sum, const void *const *gradients, uint32_t gradient_count,
                    enum lh_dtype dtype, uint64_t count, bool is_first);

#endif
