/*
 * The accelerator of the simulator: struct lh_dev in virtual time.
 *
 * Three lanes execute what they are given, each in order: copies in, copies out, and the stream
 * that computes. A fence is a place in a lane, and what waits for a fence waits for that lane to
 * come so far. Copies move over a link (link.h), or two where it is duplex; READ is to the
 * accelerator, WRITE from it.
 *
 *      copies in   | a | b |     | c |            c goes where a was: behind a's last reader
 *      stream          | a   | b   |   | c   |    behind the arrival of what it reads
 *      copies out                | ga |           behind the computation of the gradient
 *
 * Where the device is ordered (as CUDA is) the training thread runs ahead of the stream, and fences
 * alone keep these apart. Where it is not, the training thread sees a copy come back, computes, and
 * records fences when that is over; they have passed.
 *
 * With moves_bytes a copy's target is garbage from its begin to its end, and that of a copy out
 * from its submit; without, addresses are never touched, so that models of any size can be timed.
 *
 * Faults (io.h, of a copy): SPIKE takes spike_ns longer; ERROR is refused at submit, or comes back
 * with -EIO and garbage for bytes, and then the accelerator executes nothing more.
 *
 * Checked always: the bytes of a copy do not change from its submit (in) or begin (out) to its end.
 *
 * Thread: one.
 */
#ifndef LH_SIM_DEV_H
#define LH_SIM_DEV_H

#include "dev/dev.h"
#include "sim/io.h"

/* What a training thread may run ahead of the stream. */
#define LH_SIM_DEV_COMPUTE_COUNT_MAX 4096

struct lh_sim_dev_opts {
    struct lh_sim_world *world; /* borrowed until destroy */
    struct lh_sim_link_opts link;
    uint32_t copy_count; /* in flight at once, both directions together */
    bool is_ordered;
    bool moves_bytes;
    struct lh_sim_faults faults; /* SPIKE and ERROR of them */
    uint64_t seed;               /* of the faults */
};

struct lh_sim_dev_stats {
    uint64_t bytes[LH_DEV_DIRECTION_COUNT]; /* of copies that ended well */
};

/*
 * Owns:   *dev_out owns its tables; release with (*dev_out)->ops->destroy().
 * Errors: -ENOMEM; *dev_out is NULL then.
 */
int lh_sim_dev_create(const struct lh_sim_dev_opts *opts, struct lh_alloc *alloc,
                      struct lh_dev **dev_out, struct lh_error *err) LH_MUST_CHECK;
/*
 * Give the stream something to do for compute_ns; begin() and end() (either may be NULL) are called
 * when it is. More than the stream holds: asserted.
 */
void lh_sim_dev_compute(struct lh_dev *dev, uint64_t compute_ns, lh_sim_fire_fn begin,
                        lh_sim_fire_fn end, void *context);
/* The power fails: nothing comes back any more. */
void lh_sim_dev_crash(struct lh_dev *dev);
/* To be called whenever time is about to go on. */
void lh_sim_dev_check(struct lh_dev *dev);
const struct lh_sim_dev_stats *lh_sim_dev_stats(const struct lh_dev *dev);

#endif
