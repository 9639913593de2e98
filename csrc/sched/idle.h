/*
 * Idle units: what a unit without a gradient in a step owes is made when the unit is next needed.
 * Private to csrc/sched.
 *
 * [Note: Idle units] The experts of a mixture that are one tensor have gradients of zeros where no
 * token was routed to them, and AdamW moves them nevertheless: moments decay, weight decay applies,
 * and momentum continues. If each expert is a unit of its own, an idle one has no gradient at all.
 * It then owes a step: an update with a gradient of zeros and with that step's hyper-parameters.
 * Units that are parts of the same tensors are a family (lh_engine_unit.family). A step in which a
 * unit of a family has gradients is owed by the family's other units; a step in which none has
 * gradients is owed by none of them, as the whole tensor would have had no gradient.
 *
 *      close of step t       the idle units of families with gradients owe one step more
 *      a use of a unit       if it owes: it is settled, and the use waits for that
 *      lh_settle_all()      all units that owe are settled
 *
 * To settle a unit is to update it once for each step that it owes, in one pass over its bytes.
 * This is an update of the step that was closed last, like those that are deferred: the same queue,
 * slabs, slots and commit. So a step with idle units stays CLOSED until the next step's first
 * gradient, its close, an abort or a flush (LH_MESSAGE_DRAIN), and a forward can settle what it
 * needs. If the step is over already (after a flush, an abort or a resume), it is reopened: it is
 * closed again with the same number, only for units that owe, and commits again if it is due to.
 * What it moves then counts for the open step, or for no step if no forward has begun it; its
 * commit counts for no step.
 *
 * With averages_idle (ema= with idle="skip") an idle unit has no update in a step, but its
 * average takes the step. This, too, is a settlement, in each step and before that ends: then no
 * commit has to tell what a unit owes. A unit without any update so far is its own average.
 *
 * Invariants:
 *  1. The steps that a unit owes are the last ones before the open step, without a gap: before a
 *     step that the family does not owe, its units are settled. So a count describes them, which
 *     follows from the step counts that a commit has.
 *  2. No unit owes more than LH_IDLE_STEPS_MAX steps, whose hyper-parameters are kept: it is
 *     settled before that, different units after different numbers of steps. The caller stores
 *     them with its commits, and passes them when it resumes (lh_idle_history_set()).
 *  3. A unit that owes is stale: no thread gets a pin of it (lh_unit_is_stale()).
 *
 * Thread: the engine's, except where a function names another one.
 */
#ifndef LH_SCHED_IDLE_H
#define LH_SCHED_IDLE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/base.h"
#include "base/error.h"
#include "compute/adam.h"

struct lh_engine;
struct lh_ring_message;
struct lh_exec_job;
struct lh_unit;

#define LH_IDLE_STEPS_MAX 1024
/* The parameters of a unit of a family. */
#define LH_IDLE_PARAMS_MAX 8

struct lh_idle_unit {
    _Atomic uint32_t owed; /* the number of steps; other threads only read it */
    uint64_t last;         /* the last of these steps */
    bool is_wanted;        /* it owes, and waits for its place in the queue of updates */
    bool is_due;           /* it is settled in the closed step */
    uint32_t made;         /* the number of owed steps that the closed step has made */
};

struct lh_idle {
    struct lh_adam_hyper *history; /* those of a step at step % LH_IDLE_STEPS_MAX */
    uint64_t *family_steps;        /* scratch, indexed by family */
    uint32_t family_count;         /* families are numbered from 1 to it */
    uint32_t wanted_count;
    uint32_t queued_count; /* units that the closed step settles, and that are not computed yet */
    bool settles_all;
    uint32_t settle_next;   /* all units before it are settled, if settles_all */
    bool is_drained;        /* the closed step may end */
    _Atomic uint32_t owing; /* the number of units that owe */
};

/* Whether the units have families. */
bool lh_idle_is_needed(const struct lh_engine *engine);
int lh_idle_create(struct lh_engine *engine, struct lh_error *err);
void lh_idle_destroy(struct lh_engine *engine);
/* Find what the units owe, from the step counts of the last commit. Errors: -EBADMSG. */
int lh_idle_resume(struct lh_engine *engine, struct lh_error *err);
/* A thread is about to wait for a unit: settle it, if it owes. */
void lh_idle_want(struct lh_engine *engine, struct lh_unit *unit);

/* Runs on a worker: make what a unit owes, in a chunk's slab. */
void lh_idle_run(struct lh_exec_job *job);
/* All chunks of a unit are computed. */
void lh_idle_settled(struct lh_engine *engine, struct lh_unit *unit);
/* Set how many steps a unit owes, and keep the closed step's hyper-parameters. */
void lh_idle_owed_set(struct lh_engine *engine, struct lh_unit *unit, uint32_t owed);
void lh_idle_history_keep(struct lh_engine *engine);
/* The step is about to be over: count the steps that its units have made. */
void lh_idle_steps_advance(struct lh_engine *engine);

/*
 * Whether a message must wait for the end of the reopened step, which it then ends: its sender has
 * given up the wait for a unit, and does not know that the step was reopened for it.
 */
bool lh_idle_holds(struct lh_engine *engine, const struct lh_ring_message *message);

#endif
