/*
 * The workers of the simulator: struct lh_exec in virtual time.
 *
 * A job takes its work_bytes at the rate of one worker, rounded up. With run_jobs its function is
 * called when its time is over, so that what it makes is there no earlier, and what it needs has to
 * be there that long; without, it is only timed.
 *
 * Checked always: no worker is idle while a job waits.
 *
 * Thread: one.
 */
#ifndef LH_SIM_EXEC_H
#define LH_SIM_EXEC_H

#include "exec/exec.h"
#include "sim/world.h"

/* Bytes of memory that one element of an update moves, P to V; what the engine counts a job as. */
#define LH_SIM_ADAM_BYTES_PER_ELEMENT 24

struct lh_sim_exec_opts {
    struct lh_sim_world *world; /* borrowed until destroy */
    uint32_t worker_count;
    uint64_t bytes_per_s; /* of one worker */
    uint32_t queue_depth_max;
    bool run_jobs;
};

/*
 * Owns:   *exec_out owns its tables; release with (*exec_out)->ops->destroy().
 * Errors: -EINVAL (no workers), -ENOMEM; *exec_out is NULL then.
 */
int lh_sim_exec_create(const struct lh_sim_exec_opts *opts, struct lh_alloc *alloc,
                       struct lh_exec **exec_out, struct lh_error *err) LH_MUST_CHECK;
/* The power fails: no job comes back. */
void lh_sim_exec_crash(struct lh_exec *exec);
/* To be called whenever time is about to go on. */
void lh_sim_exec_check(struct lh_exec *exec);
uint64_t lh_sim_exec_busy_ns(const struct lh_exec *exec); /* of all workers */

#endif
