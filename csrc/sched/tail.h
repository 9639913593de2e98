/*
 * The end of the caller's scalars, copied from an accelerator's memory after the step's close
 * (tail.c). Private to csrc/sched.
 */
#ifndef LH_SCHED_TAIL_H
#define LH_SCHED_TAIL_H

#include "base/error.h"
#include "sched/feature.h"

struct lh_dev_fence;
struct lh_engine;

struct lh_tail {
    /* Set by the training thread before the message of a close. */
    const void *device;
    uint64_t bytes; /* 0: this step's scalars are complete */
    struct lh_dev_fence *is_computed;
    /* The engine's. */
    bool is_wanted; /* of the closed step, the copy is not over yet */
    bool is_copying;
};

extern const struct lh_feature lh_tail_feature;

/* Create the fence; opts.tail_memory is the engine's until lh_tail_destroy(). */
int lh_tail_create(struct lh_engine *engine, struct lh_error *err);
void lh_tail_destroy(struct lh_engine *engine);

#endif
