/*
 * What a step's updates will read and write, counted before they do. Private to csrc/sched.
 */
#ifndef LH_SCHED_UPDATE_PLAN_H
#define LH_SCHED_UPDATE_PLAN_H

struct lh_chunk;
struct lh_engine;

/* Plan what the step will move for its updates, as far as it is known when the step begins. */
void lh_update_plan_begin(struct lh_engine *engine);
/*
 * Correct the plan at the close, when it is known which units have gradients: the previous step may
 * have predicted others, or the gradients come from an older graph and the step had no forward.
 */
void lh_update_plan_correct(struct lh_engine *engine);
/*
 * A chunk is being read. If that exceeds the plan (a unit that came earlier than predicted took the
 * chunk's slab, and it is reread), extend the plan.
 */
void lh_update_plan_reread(struct lh_engine *engine, struct lh_chunk *chunk);

#endif
