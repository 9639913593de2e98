/*
 * Clipping that does not wait: updates run during backward as if the step's factor were 1, and the
 * step is repeated if it is not (repeat.c). Private to csrc/sched.
 */
#ifndef LH_SCHED_REPEAT_H
#define LH_SCHED_REPEAT_H

#include <stdatomic.h>

#include "base/error.h"
#include "sched/feature.h"

struct lh_engine;

struct lh_repeat_unit {
    bool is_kept; /* the unit is updated, and its gradients stay for a repetition */
};

struct lh_repeat {
    struct lh_error refusal; /* the first update that was refused in this step; code 0: none */
    _Atomic bool waits;      /* the open step's updates wait for its close */
};

extern const struct lh_feature lh_repeat_feature;

/* Whether the open step's updates do not begin before its close. */
bool lh_repeat_waits(const struct lh_engine *engine);
int lh_repeat_create(struct lh_engine *engine, struct lh_error *err);

#endif
