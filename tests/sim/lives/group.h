/*
 * Several processes in one virtual time, which train together (lives/peer.h) over a network
 * (lives/net.h), and end together.
 *
 *      all engines and training threads are polled, until none moves;
 *      engines without news go to sleep, the checkers run;
 *      then the earliest event of all worlds happens: at the same time, that of the lowest rank,
 *      and messages last
 *
 * Each process has a world, whose events are its requests, jobs, copies and computations. All
 * worlds have the same time. If one process ends, or the power of one machine, the others continue
 * for a while, and then all end, at once or after a commit of what they have closed: none can
 * finish a step without the others. Machines that did not lose power keep running. The next lives
 * agree on a step as python/lohan does ([Note: The step that all have] in replicas/_join.py): the
 * smallest of the stores' newest steps.
 *
 * Always checked, in addition to what each process checks:
 *  1. No process is more than one step ahead of another one.
 *  2. No store is more than one commit ahead of another one, none has lost a committed step, and
 *     all can be opened at the common step.
 *  3. Nothing hangs while all processes are alive, and nothing repeats forever.
 *
 * Thread: one.
 */
#ifndef LH_TEST_SIM_GROUP_H
#define LH_TEST_SIM_GROUP_H

#include "lives/peer.h"

struct lh_sim_group_opts {
    const struct lh_sim_crew *crew;        /* borrowed until deinit */
    const struct lh_sim_lives_opts *lives; /* by rank; borrowed for the call */
    struct lh_sim_net_opts net;            /* without deliver */
};

/* Where a process ends, and what happens then. */
struct lh_sim_group_crash {
    uint64_t after;  /* events; UINT64_MAX: no process ends */
    uint64_t commit; /* above 0: after the begin of this commit of the process's store */
    uint32_t rank;
    bool is_power;  /* its machine loses power */
    uint64_t later; /* the others end this many events later, at the latest */
    bool is_well;   /* those that wait for the process then commit what they have closed */
};

struct lh_sim_group {
    const struct lh_sim_crew *crew;
    struct lh_sim_net net;
    struct lh_sim_peer peers[LH_SIM_PEER_COUNT_MAX];
    uint64_t fired_count;
    uint64_t progress_ns; /* when something other than the end of a nap last happened */
    uint64_t step;        /* the last one that all processes have closed */
    uint64_t step_from;   /* the event count when they had */
    uint64_t resumed_step;
    uint64_t older_count; /* stores that were opened at the step before their newest one */
    struct lh_sim_group_crash crash;
    uint64_t crash_from;   /* the event count from which `after` is counted; UINT64_MAX: not yet */
    uint64_t commit_count; /* of the store of the process that is to end */
    bool was_committing;
    bool is_ending; /* a process has ended */
    uint64_t ends_at;
    bool is_leaving; /* the others have learned it */
};

/*
 * Initialize processes that do not run yet.
 *
 * Owns:   *group owns everything; release with lh_sim_group_deinit(), after an error as well.
 *         *group must not move.
 * Errors: those of the parts.
 */
int lh_sim_group_init(struct lh_sim_group *group, const struct lh_sim_group_opts *opts,
                      struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_group_deinit(struct lh_sim_group *group);
/*
 * Begin a life of every process, at a step that all stores have.
 *
 * Errors: -EPROTO (a guarantee is broken), those of a store.
 */
int lh_sim_group_open(struct lh_sim_group *group, struct lh_error *err) LH_MUST_CHECK;
/*
 * Train until DONE (all have finished and flushed), STOPPED (a process has ended, and so have the
 * others), FAILED (a process has an error: err, and *rank_out) or BROKEN (a checker found a
 * failure).
 */
enum lh_sim_end lh_sim_group_drive(struct lh_sim_group *group,
                                   const struct lh_sim_group_crash *crash, uint32_t *rank_out,
                                   struct lh_error *err);
/* End all processes after a drive that ended in this way. */
void lh_sim_group_stop(struct lh_sim_group *group, enum lh_sim_end end);

#endif
