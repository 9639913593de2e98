/*
 * Units that processes of one machine gather on their accelerators (gather.c). Private to
 * csrc/sched.
 *
 *      NONE -> COPYING      copy_may_be_whole  a LOAD of the plan: this process's part is copied
 *      COPYING -> OFFERED   part_copied        the part is there
 *      OFFERED -> RUNNING   list_pump          all processes have their parts
 *      OFFERED -> RETURNED  withdraw           the rest is copied from main memory, too
 *      OFFERED -> NONE      withdraw           the copy has become stale
 *      RUNNING -> NONE      gathered           the other parts are there
 *      RUNNING -> RETURNED  gathered           the connection is broken
 *      RETURNED -> NONE     rest_copied        all of the unit is there
 */
#ifndef LH_SCHED_GATHER_H
#define LH_SCHED_GATHER_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/error.h"
#include "sched/engine.h"
#include "sched/feature.h"
#include "sched/states.h"

struct lh_gather_unit {
    enum lh_gather_state state;
    uint64_t step;       /* the step that counts the load */
    uint64_t awaited_ns; /* since when a thread has waited for the OFFERED unit; 0: none has */
    bool rest_before;    /* RETURNED: the bytes before this process's part are not copied yet */
    bool rest_after;     /* the same for those after it */
};

/* The gathers that the caller's thread makes, and what it waits for. Protected by mutex. */
struct lh_gather_queue {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint32_t *units; /* a ring of unit_count */
    uint32_t first;
    uint32_t count;
    bool is_ended;
    _Atomic bool is_in_the_way; /* offered units may be in the way of what a thread waits for */
};

struct lh_gather {
    struct lh_gather_unit *units;
    struct lh_gather_queue *queue;
    uint32_t active_count; /* units that are not NONE */
    uint64_t place;        /* in the team's list of gathers */
    uint64_t progress;     /* of this process: see progress_set() */
    bool is_still;         /* the training thread waits for other processes */
    bool is_out;           /* no more gathers in this round: another process did not come */
    bool is_broken;        /* no more gathers in this session */
};

extern const struct lh_feature lh_gather_feature;

static inline bool lh_gather_is_on(const struct lh_engine_opts *opts)
{
    return opts->gather_wait_ns > 0;
}

/* Whether a unit is large enough for each process of the team to have a part of it. */
static inline bool lh_gather_divides(const struct lh_engine_opts *opts, uint64_t bytes)
{
    return lh_gather_is_on(opts) &&
           bytes >= (uint64_t)LH_BLOCK_BYTES * (opts->team->mate_count + 1);
}

/* The bytes of a unit that a load moves over this process's link: all, or this process's part. */
static inline uint64_t lh_gather_link_bytes(const struct lh_engine_opts *opts, uint64_t bytes)
{
    if (!lh_gather_divides(opts, bytes))
        return bytes;
    uint32_t count = opts->team->mate_count + 1;
    return lh_gather_edge(bytes, count, opts->team->mate + 1) -
           lh_gather_edge(bytes, count, opts->team->mate);
}

/* Errors: -EINVAL (too many processes), -ENOMEM. */
int lh_gather_create(struct lh_engine *engine, struct lh_error *err);
/* The engine's thread has ended: withdraw all offers, and end lh_gather_next(). */
void lh_gather_stop(struct lh_engine *engine);
void lh_gather_destroy(struct lh_engine *engine);

#endif
