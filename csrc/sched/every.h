/*
 * The steps between commits, if the caller chooses their number only after some steps.
 */
#ifndef LH_SCHED_EVERY_H
#define LH_SCHED_EVERY_H

#include <stdbool.h>
#include <stdint.h>

struct lh_engine;

/*
 * From the open step on, commit every `every` steps (those whose number is a multiple of it), in
 * place of opts.commit_every. `every` must be above 1. Call it once, before the first gradient of
 * the step. Returns false, without effect, if gradients wait on SSD (opts.commit_every of 1 and too
 * little memory for them): they are in the slot of the next commit, so every step must commit.
 */
bool lh_every_set(struct lh_engine *engine, uint64_t every);

#endif
