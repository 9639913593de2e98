/*
 * Deferred updates: which units wait for the close of their step (defer.c). Private to csrc/sched.
 */
#ifndef LH_SCHED_DEFER_H
#define LH_SCHED_DEFER_H

#include "base/base.h"
#include "sched/feature.h"

struct lh_engine;
struct lh_unit;
struct lh_chunk;
struct lh_slab;

struct lh_defer_unit {
    bool is_deferred; /* the unit's update waits for the close */
    bool is_released; /* the step is closed, and the update may be queued now */
    uint32_t position;
};

struct lh_defer {
    uint32_t *order; /* units whose updates wait, in the order in which they are due */
    uint32_t first;  /* all units before this index are released */
    uint32_t count;
};

extern const struct lh_feature lh_defer_feature;

/* Defer every unit. */
int lh_defer_create(struct lh_engine *engine, struct lh_error *err);
void lh_defer_destroy(struct lh_engine *engine);
/* Set whether the unit's updates wait for the close of the step. Call only between two steps. */
void lh_defer_set(struct lh_unit *unit, bool is_deferred);
/* The closed step makes what a unit owes (idle.h): its update need not wait. */
void lh_defer_release(struct lh_unit *unit);
/*
 * The unit is about to be read: queue its update if it waits, and those that are due with it. Any
 * schedule may call it.
 */
void lh_defer_approach(struct lh_engine *engine, uint32_t unit);

#endif
