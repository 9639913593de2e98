/*
 * lh_zo_apply() and lh_zo_lead() on memory of an accelerator: the accelerator's own kernel
 * (cuda/zo.cu) is enqueued on a stream.
 *
 * Thread: like the device's kernels (dev.h).
 */
#ifndef LH_COMPUTE_ZO_LAUNCH_H
#define LH_COMPUTE_ZO_LAUNCH_H

#include "compute/zo.h"
#include "dev/dev.h"

#define LH_ZO_KERNEL_NAME "lh_zo_batch"

/*
 * Enqueue ops, in order and in place, on elements first to first + count of a parameter, which
 * begin at values, an address on dev. Does not wait. The bits are those of lh_zo_apply().
 *
 * Errors: the device's. Some of the ops may have been enqueued then, and the values are
 *         unspecified.
 */
int lh_zo_launch(struct lh_dev *dev, struct lh_dev_kernel *kernel, void *stream, float *values,
                 uint64_t first, uint64_t count, const struct lh_zo_op *ops, uint32_t op_count,
                 struct lh_error *err) LH_MUST_CHECK;

/*
 * Enqueue lh_zo_lead() for a parameter with a stored state; both addresses are on dev.
 *
 * Errors: -EINVAL as lh_zo_launch_check(), before anything is enqueued; the device's, as above: the
 *         state is unspecified then, too.
 */
int lh_zo_launch_lead(struct lh_dev *dev, struct lh_dev_kernel *kernel, void *stream,
                      const struct lh_zo_kept *kept, uint64_t first, uint64_t count,
                      const struct lh_zo_op *ops, uint32_t op_count, struct lh_error *err)
    LH_MUST_CHECK;

/*
 * Check whether lh_zo_launch_lead() can run these ops: a launch takes at most 64, and ops may be
 * split into launches only after a ROUND.
 *
 * Errors: -EINVAL (more than 64 ops follow one another without a ROUND).
 */
int lh_zo_launch_check(const struct lh_zo_op *ops, uint32_t op_count, struct lh_error *err)
    LH_MUST_CHECK;

#endif
