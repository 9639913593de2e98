/*
 * What every part of the engine uses: the clock, the first error, waking of waiting threads, the
 * counters of a step and the trace. Private to csrc/sched; depends on no other part of it.
 */
#ifndef LH_SCHED_CORE_H
#define LH_SCHED_CORE_H

#include "sched/engine.h"

struct lh_engine;

/* Whether this is a forked child, where no engine thread handles messages. Thread: any. */
bool lh_core_is_forked(const struct lh_engine *engine);
/* The engine's clock. Thread: any, as for the next five functions. */
uint64_t lh_core_now(const struct lh_engine *engine);
/* Wake all threads that wait for the engine. */
void lh_core_notify(struct lh_engine *engine);
/* Fail the engine: keep the first error, and end every wait. */
void lh_core_fail(struct lh_engine *engine, const struct lh_error *err);
/* Fail the engine because of an error of the accelerator. what: the operation, for the message. */
void lh_core_device_fail(struct lh_engine *engine, const struct lh_error *cause, const char *what);
/* Return the code of the first error, and copy it to *err (may be NULL). 0: no error. */
int lh_core_error(struct lh_engine *engine, struct lh_error *err);
/* Return the first error's code; -ECANCELED without an error. */
int lh_core_fail_code(struct lh_engine *engine);

/* The counters of a step that is not over. Step 0: counters of work that belongs to no step. */
struct lh_engine_step_stats *lh_core_stats(struct lh_engine *engine, uint64_t step);
void lh_core_trace_add(struct lh_engine *engine, struct lh_engine_trace_event event);

#endif
