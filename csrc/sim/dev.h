/*
 * The simulator's accelerator: struct lh_dev in virtual time.
 *
 * Three lanes execute their work in order: copies in, copies out, and the compute stream. A fence
 * is a position in a lane; waiting for a fence means waiting until that lane has reached it. Copies
 * move over a link (link.h), or over one link per direction if it is duplex; READ is to the
 * accelerator, WRITE from it.
 *
 *      copies in   | a | b |     | c |            c takes the place of a: after the last read of a
 *      stream          | a   | b   |   | c   |    after the arrival of what it reads
 *      copies out                | ga |           after the computation of the gradient
 *
 * If the device is ordered (as CUDA is), the training thread runs ahead of the stream, and only
 * fences order the two. Otherwise, the training thread waits for a copy to complete, computes, and
 * records fences after the computation, which have already passed.
 *
 * Without hooks (sim/hooks.h), addresses are never accessed, so that models of any size can be
 * timed, and every copy succeeds.
 *
 * Thread: one.
 */
#ifndef LH_SIM_DEV_H
#define LH_SIM_DEV_H

#include "dev/dev.h"
#include "sim/link.h"

/* How many computations a training thread may run ahead of the stream. */
#define LH_SIM_DEV_COMPUTE_COUNT_MAX 4096

struct lh_sim_dev_opts {
    struct lh_sim_world *world; /* borrowed until destroy */
    struct lh_sim_link_opts link;
    uint32_t copy_count; /* the most copies in flight at once, both directions together */
    bool is_ordered;
};

struct lh_sim_dev_stats {
    uint64_t bytes[LH_DEV_DIRECTION_COUNT]; /* the bytes of copies that succeeded */
};

/*
 * Create a simulated accelerator.
 *
 * Owns:   *dev_out owns its tables; release with (*dev_out)->ops->destroy().
 * Errors: -ENOMEM; *dev_out is NULL then.
 */
int lh_sim_dev_create(const struct lh_sim_dev_opts *opts, struct lh_alloc *alloc,
                      struct lh_dev **dev_out, struct lh_error *err) LH_MUST_CHECK;
/*
 * Enqueue a computation of compute_ns on the stream; begin() and end() (either may be NULL) are
 * called when the computation begins and ends. Asserts that the stream has room.
 */
void lh_sim_dev_compute(struct lh_dev *dev, uint64_t compute_ns, lh_sim_fire_fn begin,
                        lh_sim_fire_fn end, void *context);
/* Simulate the end of the process: nothing in flight completes. */
void lh_sim_dev_drop(struct lh_dev *dev);
/* Call this whenever time is about to advance. */
void lh_sim_dev_check(struct lh_dev *dev);
const struct lh_sim_dev_stats *lh_sim_dev_stats(const struct lh_dev *dev);

#endif
