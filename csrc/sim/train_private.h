/* Declarations that the parts of the training script share: private to train*.c and to hooks. */
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
/* Begin the first block of a forward, of a step or of an evaluation. */
enum lh_sim_look lh_sim_train_forward_begin(struct lh_sim_train *train);
/* Begin the forward of the step's next micro-batch. */
enum lh_sim_look lh_sim_train_forward_repeat(struct lh_sim_train *train);
/* Use all blocks, in the order of the model. */
void lh_sim_train_order_reset(struct lh_sim_train *train);
/* Enter backward. The caller then begins the first block of backward. */
void lh_sim_train_backward_enter(struct lh_sim_train *train);

/*
 * Whether a wait function may return a different result than at its last call. Even with a timeout
 * of 0, a wait is a system call, which would slow down a step of many requests. So the function is
 * called once, which tells the engine that a thread waits, and again when is_there is true.
 */
bool lh_sim_train_is_worth_asking(struct lh_sim_train *train, bool is_there);
bool lh_sim_train_steps_are_over(const struct lh_engine *engine);
uint64_t lh_sim_train_waited_ns(const struct lh_sim_train *train);
struct lh_sim_train_times *lh_sim_train_times_of(struct lh_sim_train *train);

/* train_saved.c: saved tensors of the current part */
/* Wait until the tensors that the part's forward saved have been fetched; then compute. */
enum lh_sim_look lh_sim_train_saved_wait(struct lh_sim_train *train);
/* In forward, wait until saved tensors occupy little enough device memory. */
enum lh_sim_look lh_sim_train_saved_taken(struct lh_sim_train *train);
/* Offload the part's tensors after its forward. Returns 0, or the engine's error. */
int lh_sim_train_saved_put(struct lh_sim_train *train);
/* Fetch the part's tensors, and the tensors of earlier parts that have room. */
void lh_sim_train_saved_fetch(struct lh_sim_train *train);
/* Drop the part's tensors after its backward has read them. */
void lh_sim_train_saved_drop(struct lh_sim_train *train);

#endif
