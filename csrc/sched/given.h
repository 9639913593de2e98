/*
 * Given units: trained units whose states another process has (given.c). Private to csrc/sched.
 */
#ifndef LH_SCHED_GIVEN_H
#define LH_SCHED_GIVEN_H

#include "base/base.h"
#include "sched/feature.h"

struct lh_engine;
struct lh_exec_job;
struct lh_unit;

struct lh_given_unit {
    bool is_there; /* the new values of the closed step are in memory */
};

extern const struct lh_feature lh_given_feature;

/* Whether the unit is trained, but another process has its states. */
bool lh_given_is(const struct lh_unit *unit);
/* Whether the engine has such a unit. */
bool lh_given_is_any(const struct lh_engine *engine);
/* Runs on a worker: put new values into a chunk of the unit, in place of an AdamW update. */
void lh_given_run(struct lh_exec_job *job);

#endif
