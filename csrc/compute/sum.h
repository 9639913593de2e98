/*
 * Sums of gradients over several backwards, in fp32: element by element, in the order in which the
 * gradients arrive, so that fp32 sums match torch's own p.grad bit for bit.
 *
 * Pure. Thread: any.
 */
#ifndef LH_COMPUTE_SUM_H
#define LH_COMPUTE_SUM_H

#include "base/dtype.h"

/* A gradient to be added. */
struct lh_sum_source {
    const void *gradient;
    uint32_t checksum; /* CRC-32C, which is continued with the gradient's bytes if is_checked */
    bool is_checked;
};

/* Set sum = gradient, for the first gradient (F32, BF16 or F16). Zeros keep their signs. */
void lh_sum_start(float *sum, const void *gradient, enum lh_dtype dtype, uint64_t count);
/* Add a later gradient to sum. */
void lh_sum_add(float *sum, const void *gradient, enum lh_dtype dtype, uint64_t count);
/*
 * Add gradients one after the other; the first one starts the sum if is_first. The bits are those
 * of as many calls of the functions above, but the sum passes through memory only once, and so does
 * a gradient whose checksum is computed: it is in the sum before the caller can compare it.
 */
void lh_sum_add_all(float *sum, struct lh_sum_source *sources, uint32_t source_count,
                    enum lh_dtype dtype, uint64_t count, bool is_first);

#endif
