/*
 * What a step's updates will read and write, counted before they do. Private to csrc/sched.
 */
#ifndef LH_SCHED_UPDATE_PLAN_H
#define LH_SCHED_UPDATE_PLAN_H

struct lh_chunk;
struct lh_engine;

/* What the step will move for its updates, as far as it is known when the step begins. */
void lh_update_plan_begin(struct lh_engine *engine);
/*
 * At the close it is known which units have gradients: the plan is corrected where the step before
 * misled it, or where the step has gradients of a graph from before and no forward of its own.
 */
void lh_update_plan_correct(struct lh_engine *engine);
/*
 * A chunk is being read: where that is more than planned, its slab was taken for a unit that came
 * before the one predicted, and it is read again.
 */
void lh_update_plan_reread(struct lh_engine *engine, struct lh_chunk *chunk);

#endif
