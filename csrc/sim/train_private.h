/* What the parts of the training script share. Private to csrc/sim/train*.c. */
#ifndef LH_SIM_TRAIN_PRIVATE_H
#define LH_SIM_TRAIN_PRIVATE_H

#include "sim/train.h"

/* What one look at a state came to. */
enum lh_sim_look {
    LH_SIM_LOOK_WAIT,
    LH_SIM_LOOK_MOVED,
};

/* train.c: each returns MOVED */
enum lh_sim_look lh_sim_train_state_set(struct lh_sim_train *train, enum lh_sim_train_state state);
enum lh_sim_look lh_sim_train_failed(struct lh_sim_train *train, int rc);
enum lh_sim_look lh_sim_train_compute_begin(struct lh_sim_train *train);
enum lh_sim_look lh_sim_train_part_next(struct lh_sim_train *train);
enum lh_sim_look lh_sim_train_begin(struct lh_sim_train *train);
enum lh_sim_look lh_sim_train_block_begin(struct lh_sim_train *train, uint32_t block);

/*
 * Whether the engine's answer to a wait may have changed since it was asked. A wait goes through
 * the kernel even with a timeout of 0, which a step of many requests would feel; so it is asked
 * once, which tells the engine that somebody waits, and again when there is something to be had.
 */
bool lh_sim_train_is_worth_asking(struct lh_sim_train *train, bool is_there);
bool lh_sim_train_steps_are_over(const struct lh_engine *engine);
uint64_t lh_sim_train_waited_ns(const struct lh_sim_train *train);
struct lh_sim_train_times *lh_sim_train_times_of(struct lh_sim_train *train);

/* train_saved.c: of the part that computes */
/* Until what its forward saved is back: then it computes. */
enum lh_sim_look lh_sim_train_saved_wait(struct lh_sim_train *train);
/* Forward waits for device memory that what it saved still takes. */
enum lh_sim_look lh_sim_train_saved_taken(struct lh_sim_train *train);
/* Its forward is over: 0, or the engine's error. */
int lh_sim_train_saved_put(struct lh_sim_train *train);
/* Ask for what it saved, and for what parts before it did as far as there is room. */
void lh_sim_train_saved_fetch(struct lh_sim_train *train);
/* Its backward has read them. */
void lh_sim_train_saved_drop(struct lh_sim_train *train);

/* train_hold.c: a step begins; and at any time: true if anything happened */
void lh_sim_train_hold_begin(struct lh_sim_train *train);
bool lh_sim_train_hold_poll(struct lh_sim_train *train);

/* train_edit.c */
/* Between two steps: whether the caller changes parameters here. Then the state is EDIT. */
bool lh_sim_train_edit_draw(struct lh_sim_train *train);
enum lh_sim_look lh_sim_train_edit(struct lh_sim_train *train);
enum lh_sim_look lh_sim_train_pause(struct lh_sim_train *train);

#endif
