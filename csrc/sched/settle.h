/*
 * When idle units are settled: the feature that [Note: Idle units] in idle.h describes. Private to
 * csrc/sched.
 */
#ifndef LH_SCHED_SETTLE_H
#define LH_SCHED_SETTLE_H

#include "sched/feature.h"

extern const struct lh_feature lh_settle_feature;

#endif
