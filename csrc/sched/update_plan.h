/*
 * The numbers of bytes that a step's updates will read and write, counted in advance. Private to
 * csrc/sched.
 */
#ifndef LH_SCHED_UPDATE_PLAN_H
#define LH_SCHED_UPDATE_PLAN_H

struct lh_chunk;
struct lh_engine;
struct lh_unit;

/*
 * Count the bytes that the step's updates will move, as far as they are known when the step begins.
 */
void lh_update_plan_begin(struct lh_engine *engine);
/*
 * Correct the plan at the step's close, when it is known which units have gradients. These can
 * differ from the units that the previous step updated; and if the gradients came from an older
 * graph, the step had no forward and no plan.
 */
void lh_update_plan_correct(struct lh_engine *engine);
/* Count the bytes of an update that a unit owes and that the closed step makes (idle.h). */
void lh_update_plan_settled(struct lh_engine *engine, struct lh_unit *unit);
/*
 * A read of a chunk has begun. If this exceeds the plan, extend the plan: a chunk is read again if
 * a unit whose gradients arrived earlier than predicted took the chunk's slab.
 */
void lh_update_plan_reread(struct lh_engine *engine, struct lh_chunk *chunk);

#endif
