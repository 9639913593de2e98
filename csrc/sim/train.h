/*
 * The training thread as a script in virtual time: what csrc/py's hooks do for a list of blocks,
 * one call after the other, and never blocking: every call of the engine that waits is asked with a
 * timeout of 0, and again when the engine has moved.
 *
 *      BEGIN -> ACQUIRE the block's units -> COMPUTE -> (backward) GRADIENTs -> next block
 *      forward: handles are added, the units released; backward: the other way round
 *      saved tensors: forward puts them behind COMPUTE, and waits (TAKEN) while too many are on
 *      their way; backward fetches as many ahead as there is room for, and waits (SAVED)
 *      CLOSE -> BEGIN of the next step, or FLUSH -> DONE
 *
 * Where an accelerator is ordered (dev.h) COMPUTE gives the stream what to do and goes on at once,
 * as does GRADIENT: the thread runs ahead until a unit is not to be had yet.
 *
 * By chance (of the seed) the caller changes parameters between two steps (train_edit.c), or an
 * evaluation comes there, a parameter has no gradient, a
 * step dies in backward and is aborted, or a flush follows a close.
 *
 * With a reference, checked always: the bytes of a unit are the reference's at the begin and at the
 * end of every use, and gradients are garbage as soon as the engine says that it has consumed them.
 *
 * Thread: one.
 */
#ifndef LH_SIM_TRAIN_H
#define LH_SIM_TRAIN_H

#include "sim/dev.h"
#include "sim/fs.h"
#include "sim/reference.h"
#include "sim/target.h"

#define LH_SIM_STEP_COUNT_MAX 64

enum lh_sim_train_state {
    LH_SIM_TRAIN_STATE_BEGIN = 0,
    LH_SIM_TRAIN_STATE_ACQUIRE,
    LH_SIM_TRAIN_STATE_SAVED, /* until what its forward saved is back */
    LH_SIM_TRAIN_STATE_COMPUTE,
    LH_SIM_TRAIN_STATE_TAKEN, /* until little enough that it saved is on its way out */
    LH_SIM_TRAIN_STATE_GRADIENT,
    LH_SIM_TRAIN_STATE_ROOM, /* until updates under way hold few enough gradients */
    LH_SIM_TRAIN_STATE_CLOSE,
    LH_SIM_TRAIN_STATE_OVER, /* until the updates are */
    LH_SIM_TRAIN_STATE_ABORT,
    LH_SIM_TRAIN_STATE_FLUSH,
    LH_SIM_TRAIN_STATE_EDIT,  /* until all is written */
    LH_SIM_TRAIN_STATE_PAUSE, /* until the engine is: then an edit, or the commit of one */
    LH_SIM_TRAIN_STATE_DONE,
    LH_SIM_TRAIN_STATE_FAILED, /* the engine has an error: rc */
};

enum lh_sim_train_phase {
    LH_SIM_TRAIN_PHASE_FORWARD = 0,
    LH_SIM_TRAIN_PHASE_BACKWARD,
    LH_SIM_TRAIN_PHASE_EVAL,
};

struct lh_sim_train_chances {
    uint32_t eval_ppm;  /* of a step */
    uint32_t abort_ppm; /* of a block in backward; only where every step is committed */
    uint32_t skip_ppm;  /* of a parameter */
    uint32_t flush_ppm; /* of a step */
    uint32_t hold_ppm;  /* of a step: commits are held from its begin on; with abort_ppm 0 */
    uint32_t edit_ppm;  /* between two steps */
    uint32_t split_ppm; /* of a step, by schedule auto: any split instead of the engine's choice */
};

struct lh_sim_train_opts {
    struct lh_sim_world *world; /* this and the next two: borrowed until deinit */
    const struct lh_sim_model *model;
    struct lh_sim_reference *reference; /* NULL: timing only */
    struct lh_engine *engine;           /* borrowed until deinit, as is dev */
    struct lh_dev *dev;                 /* NULL: none */
    uint64_t step_last;                 /* flush and end when this step is closed */
    uint64_t gradient_ahead_bytes;
    uint64_t saved_out_bytes; /* see lh_sim_saved_opts */
    uint64_t saved_ahead_bytes;
    /* For edits: the engine's, and its file calls; with a reference only. */
    struct lh_store *store;
    struct lh_sim_fs *fs;
    struct lh_sim_target *target; /* of snapshots while commits are held; NULL: none */
    /* The process ends so many file calls after the begin of an edit; UINT64_MAX: it does not. */
    uint64_t edit_dies_after;
    bool never_quits;       /* no program ends after an edit, and drops it */
    const void *nowhere;    /* timing only: an address for gradients nobody reads */
    bool waits_for_updates; /* after each close, as the serial schedule asks of its caller */
    struct lh_sim_train_chances chances;
    uint64_t seed;
};

/* When a step began, and how long it waited for what. */
struct lh_sim_train_times {
    uint64_t begin_ns;
    uint64_t backward_ns; /* the last forward is over */
    uint64_t close_ns;    /* the last gradient is given */
    uint64_t closed_ns;
    uint64_t forward_wait_ns; /* for units */
    uint64_t backward_wait_ns;
    uint64_t gradient_wait_ns; /* for the step before, and for room */
    uint64_t saved_wait_ns;    /* in forward for their way out, in backward for their way back */
};

/* A computation that reads a block's units, or makes a gradient. */
struct lh_sim_use {
    struct lh_sim_train *train;
    uint64_t step; /* closed, when it was asked for */
    uint32_t block;
    enum lh_sim_train_phase phase;
    uint32_t param; /* whose gradient it makes */
    bool is_edited; /* it was asked for when the step's bytes had been edited */
    const uint8_t *units[LH_SIM_BLOCK_UNIT_COUNT_MAX];
};

struct lh_sim_train {
    struct lh_sim_train_opts opts;
    struct lh_sim_random random;
    struct lh_sim_random edit_random;
    enum lh_sim_train_state state;
    enum lh_sim_train_phase phase;
    int rc;
    uint64_t step; /* closed */
    uint32_t block;
    uint32_t unit;  /* of the block, to be acquired */
    uint32_t part;  /* of the model */
    uint32_t param; /* of the block, to be given: index into due */
    bool is_asked;
    bool is_computed;
    bool has_hypers;
    bool is_reference_ahead; /* it has the step that is being closed */
    uint64_t since_ns;       /* of the wait */
    bool *has_gradient;      /* in the open step */
    bool holds_commits;      /* since hold_step was closed */
    bool is_copying;         /* a snapshot, since they are held */
    uint64_t hold_step;
    uint64_t hold_until_ns;
    bool *is_held;
    void **gradients;
    uint32_t *due; /* parameters whose gradients the block gives */
    uint32_t due_count;
    uint32_t *saved_items;   /* of the engine, by the model's saved tensors */
    uint32_t saved_next;     /* those before it are not fetched yet */
    uint32_t saved_back;     /* of the part in backward: those before it are waited for */
    uint64_t fetched_bytes;  /* and not dropped */
    uint32_t *handles;       /* that this thread holds, by unit */
    struct lh_sim_use *uses; /* a ring: of as many as may be under way */
    uint32_t use_max;
    uint64_t use_count;
    uint64_t abort_count;
    uint64_t eval_count;
    uint64_t edit_count; /* begun */
    bool edit_is_due;    /* the last one is to be committed before the next backward */
    struct lh_error err; /* of an edit: the engine has none */
    struct lh_sim_train_times times[LH_SIM_STEP_COUNT_MAX]; /* of step s at s % MAX */
};

/*
 * Owns:   *train owns its tables; release with lh_sim_train_deinit().
 * Errors: -ENOMEM; nothing is owned then.
 */
int lh_sim_train_init(struct lh_sim_train *train, const struct lh_sim_train_opts *opts,
                      struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_train_deinit(struct lh_sim_train *train, struct lh_alloc *alloc);
/* Go on as far as one can now; true if anything happened. */
bool lh_sim_train_poll(struct lh_sim_train *train);
bool lh_sim_train_is_over(const struct lh_sim_train *train);

#endif
