/*
 * A step: from the first forward after the step before to its last write and its commit. Private to
 * csrc/sched.
 *
 *      OPEN -> CLOSED           lh_step_close     message CLOSE
 *      CLOSED -> COMMITTING     commit_begin      all updates are written, and a commit is due
 *      CLOSED -> OPEN           step_over         none is due
 *      COMMITTING -> OPEN       step_over         the commit is durable
 *      OPEN -> COMMITTING       commit_begin      a flush commits what closed steps left
 *      COMMITTING -> OPEN       commit_done       that is durable
 *      OPEN -> ABORTING         lh_step_abort     message ABORT
 *      ABORTING -> OPEN         abort_finish      nothing is in flight: the same step again
 */
#ifndef LH_SCHED_STEP_H
#define LH_SCHED_STEP_H

#include "sched/engine.h"
#include "sched/states.h"

struct lh_engine;

/* Messages of the training thread. */
void lh_step_begin(struct lh_engine *engine, enum lh_engine_mode mode);
void lh_step_close(struct lh_engine *engine);
void lh_step_abort(struct lh_engine *engine);
/* Commit, end or abort the step, or flush, as far as possible now. Returns whether it did. */
bool lh_step_pump(struct lh_engine *engine);
/* Whether a hold of commits was granted, and not released since ([Note: Held commits]). */
bool lh_step_holds_commits(const struct lh_engine *engine);
/* Whether a closed step waits with its commit for the end of a hold, and all else with it. */
bool lh_step_is_held(const struct lh_engine *engine);
/* Whether nothing is in flight and nothing is queued. */
bool lh_step_is_quiet(const struct lh_engine *engine);

#endif
