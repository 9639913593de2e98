/* Schedule NAIVE: no overlap within an update (naive.c). Private to csrc/sched. */
#ifndef LH_SCHED_NAIVE_H
#define LH_SCHED_NAIVE_H

#include "sched/feature.h"

extern const struct lh_feature lh_naive_feature;

/* Replaces the pipeline's own loop over queued updates. */
void lh_naive_pump_updates(struct lh_engine *engine, struct lh_update_pump *pump);

#endif
