/*
 * When idle units are settled: the feature that [Note: Idle units] in idle.h describes. Private to
 * csrc/sched, except for the training thread's function.
 */
#ifndef LH_SCHED_SETTLE_H
#define LH_SCHED_SETTLE_H

#include "base/base.h"
#include "sched/feature.h"

struct lh_engine;

extern const struct lh_feature lh_settle_feature;

/*
 * Settle all units that owe. The open step must have no gradients. Returns 1 once all are updated
 * in memory (a flush waits for their writes), 0 after timeout_ms (then call again), or -errno.
 * Thread: training.
 */
int lh_settle_all(struct lh_engine *engine, int timeout_ms) LH_MUST_CHECK;

#endif
