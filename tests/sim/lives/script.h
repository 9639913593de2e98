/*
 * The hooks of the training script (sim/train.h).
 *
 * At random (by the seed), between two steps the caller changes parameters (script_edit.c) or runs
 * an evaluation, a parameter has no gradient, a step fails in backward and is aborted, commits are
 * held back for a while (script_hold.c), or a flush follows a close.
 *
 * With a reference, always checked: the bytes of a unit are the reference's at the begin and the
 * end of every use. Gradients become garbage as soon as the engine reports them as consumed. While
 * commits are held, no commit is in progress, and the committed step does not change.
 *
 * Thread: one.
 */
#ifndef LH_TEST_SIM_SCRIPT_H
#define LH_TEST_SIM_SCRIPT_H

#include "lives/fs.h"
#include "lives/reference.h"
#include "lives/target.h"
#include "sim/train_private.h"

struct lh_sim_train_chances {
    uint32_t eval_ppm;  /* per step */
    uint32_t abort_ppm; /* per block in backward; only if every step is committed */
    uint32_t skip_ppm;  /* per parameter */
    uint32_t flush_ppm; /* per step */
    uint32_t hold_ppm;  /* per step: commits are held from its begin on; requires abort_ppm 0 */
    uint32_t edit_ppm;  /* per step, between two steps */
    uint32_t split_ppm; /* per step, schedule auto: a random split instead of the engine's choice */
};

struct lh_sim_script_opts {
    struct lh_sim_train *train;         /* borrowed until deinit, like the next three */
    struct lh_sim_reference *reference; /* NULL: no bytes; then only chances and seed are used */
    struct lh_sim_fs *fs;               /* of the engine's store */
    struct lh_sim_target *target;       /* of snapshots while commits are held; NULL: none */
    /* The process ends this many file calls after the begin of an edit; UINT64_MAX: never. */
    uint64_t edit_dies_after;
    bool never_quits; /* the program never ends directly after an edit, dropping it */
    struct lh_sim_train_chances chances;
    uint64_t seed;
};

/* A computation that reads a block's units, or makes a gradient. */
struct lh_sim_use {
    uint64_t step; /* the last closed one when the use was requested */
    uint32_t block;
    enum lh_sim_train_phase phase;
    uint32_t param; /* whose gradient it makes; UINT32_MAX: none */
    bool is_edited; /* the step's bytes had been edited when the use was requested */
    const uint8_t *units[LH_SIM_BLOCK_UNIT_COUNT_MAX];
};

struct lh_sim_script {
    struct lh_sim_script_opts opts;
    struct lh_sim_random random;
    struct lh_sim_random edit_random;
    struct lh_sim_use *uses; /* a ring of all uses that may be in progress, in order */
    uint32_t use_max;
    uint64_t use_count;
    uint64_t use_ended_count;
    bool *is_held;
    void **gradients;
    bool is_reference_ahead; /* the reference already has the step that is being closed */
    bool holds_commits;      /* a hold of commits was requested after hold_step */
    bool is_copying;         /* a snapshot has begun since then */
    uint64_t hold_step;
    uint64_t hold_until_ns;
    bool is_granted;    /* the engine has answered that commits are held */
    uint64_t held_step; /* the committed step when it answered */
    uint64_t abort_count;
    uint64_t edit_count; /* the number of edits begun */
    bool edit_is_due;    /* the last edit is to be committed before the next backward */
    struct lh_error err; /* the error of an edit, which is not an error of the engine */
};

/*
 * Begin a life, whose training thread exists.
 *
 * Owns: *script owns its tables; release with lh_sim_script_deinit().
 */
void lh_sim_script_init(struct lh_sim_script *script, const struct lh_sim_script_opts *opts,
                        struct lh_alloc *alloc);
void lh_sim_script_deinit(struct lh_sim_script *script, struct lh_alloc *alloc);

/* The hooks; context is a struct lh_sim_lives, of which the hooks use only the script. */
bool lh_sim_script_train_polled(void *context);
bool lh_sim_script_state_polled(void *context);
bool lh_sim_script_forward_replaced(void *context);
void lh_sim_script_forward_begun(void *context, bool *has_gradient);
bool lh_sim_script_backward_replaced(void *context);
bool lh_sim_script_backward_aborted(void *context);
void lh_sim_script_gradients_begun(void *context);
void lh_sim_script_use_made(void *context);
const void *lh_sim_script_gradient_made(void *context, uint32_t param);
void lh_sim_script_use_begun(void *context);
void lh_sim_script_use_ended(void *context);
void lh_sim_script_closing(void *context);
bool lh_sim_script_closed(void *context);

/* The hooks that a script without a reference needs, as initializers. */
#define LH_SIM_SCRIPT_HOOKS                                                                        \
    .train_polled = lh_sim_script_train_polled, .state_polled = lh_sim_script_state_polled,        \
    .forward_replaced = lh_sim_script_forward_replaced,                                            \
    .forward_begun = lh_sim_script_forward_begun,                                                  \
    .backward_replaced = lh_sim_script_backward_replaced,                                          \
    .backward_aborted = lh_sim_script_backward_aborted,                                            \
    .gradients_begun = lh_sim_script_gradients_begun, .closed = lh_sim_script_closed

/* The functions below are only for the files of the script. */
/* Draw whether an evaluation is next; if so, begin it. */
bool lh_sim_script_eval_draw(struct lh_sim_script *script);

/* script_hold.c: called when a step begins */
void lh_sim_script_hold_begin(struct lh_sim_script *script);
/* Called at any time; returns true if anything happened. */
bool lh_sim_script_hold_poll(struct lh_sim_script *script);
/* Check that no commit happens while commits are held. Called when nothing moves. */
void lh_sim_script_hold_check(struct lh_sim_script *script);

/* script_edit.c */
/* Draw, between two steps, whether the caller changes parameters now. If so, enter state EDIT. */
bool lh_sim_script_edit_draw(struct lh_sim_script *script);
enum lh_sim_look lh_sim_script_edit(struct lh_sim_script *script);
enum lh_sim_look lh_sim_script_pause(struct lh_sim_script *script);

#endif
