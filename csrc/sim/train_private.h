/* Shared by the parts of the training script. Private to csrc/sim/train*.c and to hooks. */
#ifndef LH_SIM_TRAIN_PRIVATE_H
#define LH_SIM_TRAIN_PRIVATE_H

#include "sim/train.h"

/* The result of polling a state. */
enum lh_sim_look {
    LH_SIM_LOOK_WAIT,
    LH_SIM_LOOK_MOVED,
};

/* train.c: each of these returns MOVED */
enum lh_sim_look lh_sim_train_state_set(struct lh_sim_train *train, enum lh_sim_train_state state);
enum lh_sim_look lh_sim_train_failed(struct lh_sim_train *train, int rc);
enum lh_sim_look lh_sim_train_compute_begin(struct lh_sim_train *train);
enum lh_sim_look lh_sim_train_part_next(struct lh_sim_train *train);
enum lh_sim_look lh_sim_train_begin(struct lh_sim_train *train);
enum lh_sim_look lh_sim_train_block_begin(struct lh_sim_train *train, uint32_t block);
/* Enter backward, at whose first block the script then begins. */
void lh_sim_train_backward_enter(struct lh_sim_train *train);

/*
 * Whether a wait may have a different result than when it was last called. A wait is a system call
 * even with a timeout of 0, which would slow down a step of many requests. So it is called once,
 * which tells the engine that somebody waits, and again when is_there.
 */
bool lh_sim_train_is_worth_asking(struct lh_sim_train *train, bool is_there);
bool lh_sim_train_steps_are_over(const struct lh_engine *engine);
uint64_t lh_sim_train_waited_ns(const struct lh_sim_train *train);
struct lh_sim_train_times *lh_sim_train_times_of(struct lh_sim_train *train);

/* train_saved.c: saved tensors of the part that computes */
/* Wait until the tensors that its forward saved are back; then compute. */
enum lh_sim_look lh_sim_train_saved_wait(struct lh_sim_train *train);
/* In forward, wait for device memory that saved tensors still occupy. */
enum lh_sim_look lh_sim_train_saved_taken(struct lh_sim_train *train);
/* Offload its tensors after its forward. Returns 0, or the engine's error. */
int lh_sim_train_saved_put(struct lh_sim_train *train);
/* Fetch its tensors, and those of earlier parts while there is room. */
void lh_sim_train_saved_fetch(struct lh_sim_train *train);
/* Drop its tensors after its backward has read them. */
void lh_sim_train_saved_drop(struct lh_sim_train *train);

#endif
