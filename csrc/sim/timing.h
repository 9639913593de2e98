/*
 * The time of a step: a training run in virtual time until its steps repeat, and the figures of one
 * of them.
 *
 *      steps 1 .. N - 1   everything is written for the first time; the order of uses is recorded
 *      step N             measured, from its begin to the begin of the next step
 *      step N + 1         so that the work that step N leaves to the next forward is included
 *
 * If not every step commits, step N - 3 does (a later one if every second or third step commits),
 * and step N is a step between commits. The total time of the steps from the commit to N, minus the
 * time of as many steps like N, is the cost of one commit, whichever step pays it. If commits are
 * rarer, the simulation still commits as often as this requires, and the caller spreads the cost
 * over the actual number of steps.
 *
 * A cluster (sim/cluster.h) is measured in the same way.
 *
 * No bytes exist, so a model may have any size. The engine and all checkers run as in the tests; a
 * checker that finds a failure ends the run with an error.
 *
 * Thread: one.
 */
#ifndef LH_SIM_TIMING_H
#define LH_SIM_TIMING_H

#include "sim/cluster.h"

struct lh_sim_timing_opts {
    struct lh_sim_machine machine;
    const struct lh_sim_model *model; /* borrowed for the call */
    uint64_t host_bytes;
    struct lh_sim_saved_opts saved;
    uint64_t commit_every; /* in steps; LH_ENGINE_COMMIT_NEVER: no step commits */
    enum lh_engine_schedule schedule;
    struct lh_sim_micro micro; /* of one engine; a cluster has its own */
    uint32_t io_depth;
    uint64_t transfer_bytes;
    /* Owned by the caller: receives the newest events of the run, to plot its last steps. */
    struct lh_engine_trace_event *trace;
    uint32_t trace_max; /* 0: none */
    /* Several nodes or accelerators: the times are those of node 0's owner. If node_count is 0,
     * there is one engine, which gets its gradients directly. */
    struct lh_sim_cluster_opts cluster;
    bool only_checks; /* only check whether the model fits: run no step, all times are 0 */
    /* Called at intervals; returning true ends the run with -EINTR. May be NULL. */
    bool (*is_cancelled)(void *context);
    void *context;
};

struct lh_sim_timing {
    uint64_t begin_ns; /* when the step begins, in virtual time */
    uint32_t trace_count;
    uint64_t step_ns; /* to the next begin; of a step between commits if commit_every is above 1 */
    /* The additional time of a commit, once in commit_every steps. */
    uint64_t commit_ns;
    uint64_t commit_write_bytes; /* the additional bytes of a commit, to all SSDs */
    uint64_t forward_ns;
    uint64_t backward_ns;
    uint64_t close_wait_ns; /* from the last gradient to the end of the close */
    uint64_t compute_ns;    /* the time of computation, without waits */
    uint64_t forward_wait_ns;
    uint64_t backward_wait_ns;
    uint64_t gradient_wait_ns;
    uint64_t saved_wait_ns;
    struct lh_engine_step_stats stats;
    struct lh_budget budget;
    uint64_t ssd_bytes; /* the size of the model's store, with all slots, and of a packed base */
    uint64_t plan_around_count; /* how often the engine was stuck until it replanned */
    uint64_t step;              /* the number of the measured step */
    uint64_t net_bytes;         /* what a node of a cluster sends in a step */
};

/*
 * Measure a step.
 *
 * Errors: -ENOMEM; -ENOSPC: host_bytes, or the accelerator's memory, is below what the model needs
 *         (the message has both numbers); -EINVAL: the cluster cannot be simulated; -EINTR;
 *         -EPROTO: a checker found a failure, which is a bug in lohan. *timing_out is all 0 then.
 */
int lh_sim_timing_run(const struct lh_sim_timing_opts *opts, struct lh_alloc *alloc,
                      struct lh_sim_timing *timing_out, struct lh_error *err) LH_MUST_CHECK;

#endif
