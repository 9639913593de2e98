/*
 * What must hold of the engine at every moment, looked at from outside of it whenever nothing moves
 * and time is about to go on. It reads the engine's state (engine_private.h) and changes nothing.
 *
 *  1. No region, main memory's or the accelerator's, holds two units at one address.
 *  2. Steps are over in order, one by one, and the bytes of each over every link are those planned.
 *  3. What the engine counted is what the links moved.
 *  4. The engine's and the backends' counts of requests and copies in flight agree.
 *  5. Nothing hangs: where no event is to come and training is not over, somebody waits for ever.
 *  6. By schedule naive, all chunks that move are of one unit, and read, computed or written alike.
 *  7. By schedule auto, gradients that wait for the close have their room in memory.
 *  8. While commits are held none is under way, and the committed step stays.
 *
 * Thread: one.
 */
#ifndef LH_SIM_CHECK_H
#define LH_SIM_CHECK_H

#include "sim/io.h"
#include "sim/train.h"

struct lh_sim_check {
    struct lh_sim_world *world; /* these are borrowed until deinit */
    const struct lh_sim_model *model;
    struct lh_engine *engine;
    struct lh_io *io;
    /* Where each unit was in main memory, and its copy, when last looked at; UINT64_MAX: nowhere */
    uint64_t *places[2];
    uint64_t step;                                           /* the last one that was over */
    uint64_t end_ns;                                         /* of it */
    uint64_t bytes[LH_ENGINE_LINK_COUNT];                    /* of all steps that are over */
    bool is_held;                                            /* when last looked at */
    uint64_t held_step;                                      /* committed then */
    bool has_flush_commits;                                  /* commits that belong to no step */
    struct lh_engine_step_stats last[LH_SIM_STEP_COUNT_MAX]; /* of step s at s % MAX */
};

/*
 * Owns:   *check owns a table; release with lh_sim_check_deinit().
 * Errors: -ENOMEM; nothing is owned then.
 */
int lh_sim_check_init(struct lh_sim_check *check, struct lh_sim_world *world,
                      const struct lh_sim_model *model, struct lh_engine *engine, struct lh_io *io,
                      struct lh_error *err) LH_MUST_CHECK;
void lh_sim_check_deinit(struct lh_sim_check *check);
/* Nothing moves. */
void lh_sim_check_quiet(struct lh_sim_check *check);
/* Training is over without an error, flushed, and no step was aborted: invariant 3. */
void lh_sim_check_totals(struct lh_sim_check *check);
/* No event is left, and train is not over. */
void lh_sim_check_hangs(struct lh_sim_check *check, const struct lh_sim_train *train);

#endif
