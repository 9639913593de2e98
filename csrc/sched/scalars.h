/*
 * What a commit contains beside parameters and states: step counts and the caller's bytes. The
 * first function is private to csrc/sched.
 */
#ifndef LH_SCHED_SCALARS_H
#define LH_SCHED_SCALARS_H

#include <stdint.h>

/* Write the header of a commit's scalars. Returns where the step counts are, which follow it. */
void *lh_scalars_begin(uint8_t *scalars, uint32_t param_count, uint64_t caller_bytes);

struct lh_engine;
/* Make all step counts 0, while the engine is paused: the caller has written moments of zeros. */
void lh_scalars_steps_clear(struct lh_engine *engine);

#endif
