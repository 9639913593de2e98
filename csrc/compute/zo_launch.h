/*
 * lh_zo_apply() and lh_zo_lead() where the CPU does not compute on the memory: by the accelerator's
 * own kernel (cuda/zo.cu), which a stream executes behind what it holds.
 *
 * Thread: as the device's kernels (dev.h).
 */
#ifndef LH_COMPUTE_ZO_LAUNCH_H
#define LH_COMPUTE_ZO_LAUNCH_H

#include "compute/zo.h"
#include "dev/dev.h"

#define LH_ZO_KERNEL_NAME "lh_zo_batch"

/*
 * Enqueue ops, in order, on elements first to first + count of a parameter, which begin at values,
 * an address of dev's, in place. Does not wait. The bits are those of lh_zo_apply().
 *
 * Errors: the device's. Some of the ops may be enqueued all the same: what values are then is
 *         unknown.
 */
int lh_zo_launch(struct lh_dev *dev, struct lh_dev_kernel *kernel, void *stream, float *values,
                 uint64_t first, uint64_t count, const struct lh_zo_op *ops, uint32_t op_count,
                 struct lh_error *err) LH_MUST_CHECK;

/*
 * The same for a parameter that is kept, both of whose addresses are dev's: lh_zo_lead().
 *
 * Errors: -EINVAL as lh_zo_launch_check(), before anything is enqueued; the device's as above: what
 *         is kept is unknown then, too.
 */
int lh_zo_launch_lead(struct lh_dev *dev, struct lh_dev_kernel *kernel, void *stream,
                      const struct lh_zo_kept *kept, uint64_t first, uint64_t count,
                      const struct lh_zo_op *ops, uint32_t op_count, struct lh_error *err)
    LH_MUST_CHECK;

/*
 * Whether lh_zo_launch_lead() takes so many ops: 64 fit a launch, and launches may only be cut
 * behind a ROUND.
 *
 * Errors: -EINVAL: more of them follow one another.
 */
int lh_zo_launch_check(const struct lh_zo_op *ops, uint32_t op_count, struct lh_error *err)
    LH_MUST_CHECK;

#endif
