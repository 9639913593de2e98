/* Schedule NAIVE: no overlap within an update (naive.c). Private to csrc/sched. */
#ifndef LH_SCHED_NAIVE_H
#define LH_SCHED_NAIVE_H

#include "sched/feature.h"

extern const struct lh_feature lh_naive_feature;

/* Move the queued updates, instead of the pipeline's own loop (engine.pump_updates). */
void lh_naive_pump_updates(struct lh_engine *engine, struct lh_update_pump *pump);

#endif
