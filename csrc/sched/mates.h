/*
 * Units that mates, other processes of the node, read where they are (mates.c). Private to
 * csrc/sched.
 */
#ifndef LH_SCHED_MATES_H
#define LH_SCHED_MATES_H

#include "base/error.h"
#include "sched/feature.h"

struct lh_engine;
struct lh_unit;

struct lh_mates_unit {
    bool is_wanted; /* a mate waits for the unit, which is not in main memory */
};

struct lh_mates {
    uint64_t want_count;     /* the wants that the engine has seen */
    uint64_t returned_count; /* the units given back for room that the plan knows */
    uint64_t use_count;      /* uses that this process has begun in its current cycle */
    bool is_closing;         /* a step is closed, and mates do not know it yet */
};

extern const struct lh_feature lh_mates_feature;

/* Check that the region of a team's owner is the team's. Errors: -EINVAL, -ENOMEM. */
int lh_mates_create(struct lh_engine *engine, struct lh_error *err);

#endif
