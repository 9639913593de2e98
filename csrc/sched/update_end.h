/*
 * Cleanup after a step's updates: at its end, when it is aborted, and when a unit's extents change.
 * Private to csrc/sched.
 */
#ifndef LH_SCHED_UPDATE_END_H
#define LH_SCHED_UPDATE_END_H

#include "sched/engine.h"

/* End the closed step. Everything is written, and committed if a commit was due. */
void lh_update_end_step(struct lh_engine *engine, const struct lh_engine_step_stats *stats);
/*
 * Discard every gradient, and the bytes of every unit that an update has touched. Nothing may be in
 * flight.
 */
void lh_update_end_rollback(struct lh_engine *engine);
/* Discard the states of a unit that are in slabs, whether dirty or not. */
void lh_update_end_forget_unit(struct lh_engine *engine, uint32_t unit);

#endif
