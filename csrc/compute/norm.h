/*
 * Sums of squares, for the norm of all gradients.
 *
 * A norm that depended on where a tensor was cut would depend on the budget. So sums are taken over
 * blocks of a fixed number of elements, each in one fixed order, and added in the blocks' order.
 *
 * Pure. Source: torch.nn.utils.clip_grad_norm_, in fp64.
 */
#ifndef LH_COMPUTE_NORM_H
#define LH_COMPUTE_NORM_H

#include "base/dtype.h"

/* Every chunk of every budget is whole blocks, or ends with its unit. */
#define LH_NORM_BLOCK_ELEMENTS (UINT64_C(1) << 19)

/* The sum of squares of count elements (F32, BF16 or F16) in fp64; any alignment. */
double lh_norm_square_sum(const void *elements, enum lh_dtype dtype, uint64_t count);

#endif
