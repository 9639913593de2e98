/*
 * Units that this process borrows from the owner of its team (borrow.c). Private to csrc/sched.
 */
#ifndef LH_SCHED_BORROW_H
#define LH_SCHED_BORROW_H

#include "base/error.h"
#include "sched/feature.h"
#include "sched/transfer.h"

struct lh_engine;

struct lh_borrow {
    struct lh_source source;
    uint32_t *waiting; /* units that are LOADING, because the owner does not have them yet */
    uint32_t waiting_count;
    uint64_t use_count; /* uses begun in the current cycle */
};

extern const struct lh_feature lh_borrow_feature;

/* Make the owner of the team the source of all units. Errors: -ENOMEM, -EINVAL. */
int lh_borrow_create(struct lh_engine *engine, struct lh_error *err);
/* The engine's thread has ended: give back all units but those that are lent, until destroy. */
void lh_borrow_stop(struct lh_engine *engine);
void lh_borrow_destroy(struct lh_engine *engine);

#endif
