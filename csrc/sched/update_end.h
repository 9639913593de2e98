/*
 * What a step's updates leave behind: at its end, when it is aborted, and when a unit's extents
 * change. Private to csrc/sched.
 */
#ifndef LH_SCHED_UPDATE_END_H
#define LH_SCHED_UPDATE_END_H

#include "sched/engine.h"

/* All of the closed step is written and committed if that was due. */
void lh_update_end_step(struct lh_engine *engine, const struct lh_engine_step_stats *stats);
/*
 * Nothing is in flight: forget every gradient, and the bytes of every unit that an update has
 * touched.
 */
void lh_update_end_rollback(struct lh_engine *engine);
/* Forget what slabs hold of a unit, and that any of it is dirty. */
void lh_update_end_forget_unit(struct lh_engine *engine, uint32_t unit);

#endif
