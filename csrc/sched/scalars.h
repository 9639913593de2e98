/*
 * What a commit contains beside parameters and states: step counts and the caller's bytes. Private
 * to csrc/sched.
 */
#ifndef LH_SCHED_SCALARS_H
#define LH_SCHED_SCALARS_H

struct lh_engine;

/*
 * Write the header and the step counts in front of the caller's bytes, which lh_engine_close() has
 * already copied to their place.
 */
void lh_scalars_compose(struct lh_engine *engine);

#endif
