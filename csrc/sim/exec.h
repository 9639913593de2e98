/*
 * The simulator's workers: struct lh_exec in virtual time.
 *
 * A job takes the time of its work_bytes at the rate of one worker, rounded up. The job is only
 * timed: hooks (sim/hooks.h) may run it at the end of this time.
 *
 * Always checked: no worker is idle while a job waits.
 *
 * Thread: one.
 */
#ifndef LH_SIM_EXEC_H
#define LH_SIM_EXEC_H

#include "exec/exec.h"
#include "sim/world.h"

/* The memory traffic of an update per element, from P to V, as the engine's work_bytes count it. */
#define LH_SIM_ADAM_BYTES_PER_ELEMENT 24

struct lh_sim_exec_opts {
    struct lh_sim_world *world; /* borrowed until destroy */
    uint32_t worker_count;
    uint64_t bytes_per_s; /* of one worker */
    uint32_t queue_depth_max;
};

/*
 * Create simulated workers.
 *
 * Owns:   *exec_out owns its tables; release with (*exec_out)->ops->destroy().
 * Errors: -EINVAL (no workers), -ENOMEM; *exec_out is NULL then.
 */
int lh_sim_exec_create(const struct lh_sim_exec_opts *opts, struct lh_alloc *alloc,
                       struct lh_exec **exec_out, struct lh_error *err) LH_MUST_CHECK;
/* Simulate the end of the process: no job completes. */
void lh_sim_exec_drop(struct lh_exec *exec);
/* Call this whenever time is about to advance. */
void lh_sim_exec_check(struct lh_exec *exec);

#endif
