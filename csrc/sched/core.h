/*
 * What every part of the engine uses: the clock, the first error, waking those who wait, the
 * counters of a step and the trace. Private to csrc/sched; calls nothing else of it.
 */
#ifndef LH_SCHED_CORE_H
#define LH_SCHED_CORE_H

#include "sched/engine.h"

struct lh_engine;

/* The process was forked, and this is the child: nobody takes messages or answers. Thread: any. */
bool lh_core_is_forked(const struct lh_engine *engine);
/* Thread: any, as the next four. */
uint64_t lh_core_now(const struct lh_engine *engine);
/* Wake all threads that wait for the engine. */
void lh_core_notify(struct lh_engine *engine);
/* The first error is kept, and every wait ends. */
void lh_core_fail(struct lh_engine *engine, const struct lh_error *err);
/* The same for an error of the accelerator; what: what was being done. */
void lh_core_device_fail(struct lh_engine *engine, const struct lh_error *cause, const char *what);
/* The code of the first error, which *err gets; 0 without an error. */
int lh_core_error(struct lh_engine *engine, struct lh_error *err);
/* The first error's code; -ECANCELED without an error. */
int lh_core_fail_code(struct lh_engine *engine);

/* The counters of a step that is not over; step 0: of what belongs to no step. */
struct lh_engine_step_stats *lh_core_stats(struct lh_engine *engine, uint64_t step);
/* The oldest step that is not over. */
uint64_t lh_core_step(const struct lh_engine *engine);
void lh_core_trace_add(struct lh_engine *engine, struct lh_engine_trace_event event);

#endif
