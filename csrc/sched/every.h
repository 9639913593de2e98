/*
 * The steps between commits, if the caller chooses their number only after some steps.
 */
#ifndef LH_SCHED_EVERY_H
#define LH_SCHED_EVERY_H

#include <stdint.h>

struct lh_engine;

/*
 * From the open step on, commit every `every` steps (those whose number is a multiple of it), in
 * place of opts.commit_every. Both must be above 1: gradients then wait in memory. Call it once,
 * before the first gradient of the step.
 */
void lh_every_set(struct lh_engine *engine, uint64_t every);

#endif
