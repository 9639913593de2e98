/*
 * Sums of squares, for the norm of all gradients.
 *
 * A norm that depended on where a tensor was cut would depend on the memory budget. So a sum
 * continues across cuts as if there were none: it consists of the sums of blocks, in order, each
 * over a fixed number of the tensor's elements, which are also added in a fixed order.
 *
 * Pure. Source: torch.nn.utils.clip_grad_norm_, in fp64.
 */
#ifndef LH_COMPUTE_NORM_H
#define LH_COMPUTE_NORM_H

#include "base/dtype.h"

/* Elements per block. */
#define LH_NORM_BLOCK_ELEMENTS (UINT64_C(1) << 19)
#define LH_NORM_LANE_COUNT 8

/* The sum over a tensor so far; initialize it with zeros. */
struct lh_norm_sum {
    double lanes[LH_NORM_LANE_COUNT]; /* the sums over the current, incomplete block */
    double blocks;                    /* the sum over complete blocks */
    uint64_t count;                   /* the number of elements added so far */
};

/* Add the next elements (F32, BF16 or F16); any count and alignment. */
void lh_norm_sum_add(struct lh_norm_sum *sum, const void *elements, enum lh_dtype dtype,
                     uint64_t count);
double lh_norm_sum_end(const struct lh_norm_sum *sum);

/* The sum of squares of count elements (F32, BF16 or F16) in fp64; any alignment. */
double lh_norm_square_sum(const void *elements, enum lh_dtype dtype, uint64_t count);

#endif
