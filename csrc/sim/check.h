/*
 * The invariants of the engine, checked from outside whenever nothing moves and time is about to
 * advance. The checks read the engine's state (engine_private.h) and change nothing.
 *
 *  1. No region, in main memory or on the accelerator, holds two units at one address.
 *  2. Steps end in order, one by one, and each moves the planned bytes over every link.
 *  3. The bytes that the engine counted are those that the links moved.
 *  4. The engine's and the backends' counts of requests and copies in flight agree.
 *  5. Nothing hangs: if no event is pending and training is not over, something waits forever.
 *  6. With schedule naive, all chunks that move belong to one unit, and are all read, all computed,
 *     or all written.
 *  7. With schedule auto, gradients that wait for the end of the step have room in memory.
 *
 * Thread: one.
 */
#ifndef LH_SIM_CHECK_H
#define LH_SIM_CHECK_H

#include "sim/io.h"
#include "sim/train.h"

struct lh_sim_check {
    struct lh_sim_world *world; /* borrowed until deinit, like the next three */
    const struct lh_sim_model *model;
    struct lh_engine *engine;
    struct lh_io *io;
    /* Offsets of units in main memory, and of their copies, at the last check; UINT64_MAX: none */
    uint64_t *places[2];
    uint64_t step;                                           /* the last step that ended */
    uint64_t end_ns;                                         /* when this step ended */
    uint64_t bytes[LH_ENGINE_LINK_COUNT];                    /* of all steps that have ended */
    bool has_flush_commits;                                  /* some commits belong to no step */
    struct lh_engine_step_stats last[LH_SIM_STEP_COUNT_MAX]; /* step s is at s % MAX */
};

/*
 * Initialize the checks.
 *
 * Owns:   *check owns a table; release with lh_sim_check_deinit().
 * Errors: -ENOMEM; nothing is owned then.
 */
int lh_sim_check_init(struct lh_sim_check *check, struct lh_sim_world *world,
                      const struct lh_sim_model *model, struct lh_engine *engine, struct lh_io *io,
                      struct lh_error *err) LH_MUST_CHECK;
void lh_sim_check_deinit(struct lh_sim_check *check);
/* Check the invariants. Call it when nothing moves. */
void lh_sim_check_quiet(struct lh_sim_check *check);
/* Check invariant 3. Call it after training has flushed, without errors or aborted steps. */
void lh_sim_check_totals(struct lh_sim_check *check);
/* Report a hang. Call it when no event is left although train is not over. */
void lh_sim_check_hangs(struct lh_sim_check *check, const struct lh_sim_train *train);

#endif
