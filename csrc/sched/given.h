/*
 * Given units: trained units whose states another process has (given.c). Private to csrc/sched.
 */
#ifndef LH_SCHED_GIVEN_H
#define LH_SCHED_GIVEN_H

#include "base/base.h"
#include "sched/feature.h"

struct lh_engine;

struct lh_given_unit {
    bool is_there; /* the new values of the closed step are in memory */
};

extern const struct lh_feature lh_given_feature;

/* Whether the engine has a given unit. */
bool lh_given_is_any(const struct lh_engine *engine);

#endif
