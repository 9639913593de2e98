/*
 * A step, which lasts from the first forward after the previous step's close to the step's last
 * write and its commit. Private to csrc/sched.
 *
 *      OPEN -> CLOSED           lh_step_close     message CLOSE
 *      OPEN -> CLOSED           lh_step_reopen    the last step makes more updates (idle.h)
 *      CLOSED -> COMMITTING     commit_begin      all updates are written, and a commit is due
 *      CLOSED -> OPEN           step_over         none is due
 *      COMMITTING -> OPEN       step_over         the commit is durable
 *      OPEN -> COMMITTING       commit_begin      a flush commits what closed steps left
 *      COMMITTING -> OPEN       commit_done       that is durable
 *      OPEN -> ABORTING         lh_step_abort     message ABORT
 *      OPEN -> ABORTING         lh_step_repeat    message REPEAT: only the updates are discarded
 *      ABORTING -> OPEN         abort_finish      nothing is in flight: the same step again
 */
#ifndef LH_SCHED_STEP_H
#define LH_SCHED_STEP_H

#include "sched/engine.h"
#include "sched/states.h"

struct lh_engine;

/* Handle messages of the training thread. */
void lh_step_begin(struct lh_engine *engine, enum lh_engine_mode mode);
void lh_step_close(struct lh_engine *engine);
void lh_step_abort(struct lh_engine *engine);
void lh_step_repeat(struct lh_engine *engine);
/*
 * Close the last step again, for updates that a feature adds to it (engine->is_reopened). Nothing
 * of the open step may have begun but its forward.
 */
void lh_step_reopen(struct lh_engine *engine);
/*
 * Commit, end or abort the step, or flush, as far as possible now. Returns whether anything was
 * done.
 */
bool lh_step_pump(struct lh_engine *engine);
/* Whether a hold of commits was granted and has not been released ([Note: Held commits]). */
bool lh_step_holds_commits(const struct lh_engine *engine);
/* Whether the commit of a closed step, and with it everything else, waits for the end of a hold. */
bool lh_step_is_held(const struct lh_engine *engine);
/* Discard the states of a unit that are in slabs, whether dirty or not. */
void lh_step_forget_unit(struct lh_engine *engine, uint32_t unit);
/* Whether nothing is in flight and nothing is queued. */
bool lh_step_is_quiet(const struct lh_engine *engine);

#endif
