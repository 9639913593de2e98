/*
 * What a commit carries beside the states: step counts and the caller's bytes. Private to
 * csrc/sched.
 */
#ifndef LH_SCHED_SCALARS_H
#define LH_SCHED_SCALARS_H

struct lh_engine;

/*
 * Put header and step counts in front of the caller's bytes, which lh_engine_close() put in their
 * place.
 */
void lh_scalars_compose(struct lh_engine *engine);

#endif
