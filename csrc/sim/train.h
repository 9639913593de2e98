/*
 * The training thread as a script in virtual time: it makes the calls that csrc/py's hooks make for
 * a list of blocks, in order, without blocking. Every engine call that waits is made with a timeout
 * of 0, and repeated when the engine has moved.
 *
 *      BEGIN -> ACQUIRE the block's units -> COMPUTE -> (backward) GRADIENTs -> next block
 *      forward: handles are added; backward: handles are dropped; in both, units are released
 *      saved tensors: forward offloads them after COMPUTE, and waits (TAKEN) while too many are on
 *      their way; backward fetches as many ahead as have room, and waits for its own (SAVED)
 *      CLOSE -> BEGIN of the next step, or FLUSH -> DONE
 *
 * With several micro-batches the engine adds their gradients, the next forward follows a backward,
 * and before CLOSE, SUMS hands the sums to the engine.
 *
 * If an accelerator is ordered (dev.h), COMPUTE and GRADIENT only enqueue work on the stream and
 * continue at once: the thread runs ahead until a unit is not available yet.
 *
 * Hooks (sim/hooks.h) may replace a step by something else, decide which parameters have gradients
 * and what their bytes are, and see the begin and the end of every use of a unit.
 *
 * Thread: one.
 */
#ifndef LH_SIM_TRAIN_H
#define LH_SIM_TRAIN_H

#include "sim/dev.h"
#include "sim/model.h"

#define LH_SIM_STEP_COUNT_MAX 64

/* The states of the thread; "until": what it waits for in this state. */
enum lh_sim_train_state {
    LH_SIM_TRAIN_STATE_BEGIN = 0,
    LH_SIM_TRAIN_STATE_ACQUIRE,
    LH_SIM_TRAIN_STATE_SAVED, /* until the tensors that the part's forward saved are fetched */
    LH_SIM_TRAIN_STATE_COMPUTE,
    LH_SIM_TRAIN_STATE_TAKEN, /* until few enough saved tensors are on their way out */
    LH_SIM_TRAIN_STATE_GRADIENT,
    LH_SIM_TRAIN_STATE_ROOM, /* until running updates hold few enough gradients */
    LH_SIM_TRAIN_STATE_CLOSE,
    LH_SIM_TRAIN_STATE_OVER,  /* until the updates have finished */
    LH_SIM_TRAIN_STATE_ABORT, /* used by hooks */
    LH_SIM_TRAIN_STATE_FLUSH,
    LH_SIM_TRAIN_STATE_EDIT,  /* used by hooks: until everything is written */
    LH_SIM_TRAIN_STATE_PAUSE, /* used by hooks: until the engine is paused */
    LH_SIM_TRAIN_STATE_PEERS, /* used by hooks: until other processes have come as far */
    LH_SIM_TRAIN_STATE_DONE,
    LH_SIM_TRAIN_STATE_FAILED, /* the engine has an error: rc */
    LH_SIM_TRAIN_STATE_SUMS,   /* until all gradients of the step are added */
};

enum lh_sim_train_phase {
    LH_SIM_TRAIN_PHASE_FORWARD = 0,
    LH_SIM_TRAIN_PHASE_BACKWARD,
    LH_SIM_TRAIN_PHASE_EVAL, /* used by hooks */
};

/* The micro-batches of an accumulated step, whose gradients the engine adds (sched/sum.c). */
struct lh_sim_micro {
    uint32_t step_count; /* forwards and backwards of the model; 0: one, without sums */
    /*
     * The micro-batches that a block runs one after the other before the next block does
     * (order="vertical"): its parts are those of all of them. At least 1, if there are sums.
     */
    uint32_t visit_count;
};

struct lh_sim_train_opts {
    struct lh_sim_world *world; /* borrowed until deinit, like model */
    const struct lh_sim_model *model;
    struct lh_engine *engine; /* borrowed until deinit, like dev */
    struct lh_dev *dev;       /* NULL: none */
    struct lh_sim_micro micro;
    uint64_t step_last; /* flush and end after this step is closed */
    uint64_t gradient_ahead_bytes;
    uint64_t saved_out_bytes; /* see lh_sim_saved_opts */
    uint64_t saved_ahead_bytes;
    const void *nowhere;    /* an address for gradients, which is never read */
    bool waits_for_updates; /* after each close, as the serial schedule requires of its caller */
    bool never_commits;     /* the store belongs to another process */
};

/* The times of a step, and of its waits. */
struct lh_sim_train_times {
    uint64_t begin_ns;
    uint64_t backward_ns; /* when the last forward ended */
    uint64_t close_ns;    /* when the last gradient was passed */
    uint64_t closed_ns;
    uint64_t forward_wait_ns; /* for units */
    uint64_t backward_wait_ns;
    uint64_t gradient_wait_ns; /* for the previous step, and for room */
    uint64_t saved_wait_ns;    /* for offloads in forward, and for fetches in backward */
};

struct lh_sim_train {
    struct lh_sim_train_opts opts;
    enum lh_sim_train_state state;
    enum lh_sim_train_phase phase;
    int rc;
    uint64_t step; /* the last closed step */
    uint32_t block;
    /* The blocks in the order of the step's forward, which a hook may change as the step begins. */
    uint32_t *order;
    uint32_t order_count;
    uint32_t position; /* of the current block in it */
    uint32_t unit;     /* the next unit to acquire: an index into the block's units */
    uint32_t part;     /* the current part: an index into the model's parts */
    uint32_t param;    /* the next parameter to get a gradient: an index into due */
    bool is_asked;
    bool is_computed;
    bool has_hypers;
    uint64_t since_ns;   /* when the state began */
    uint32_t micro_step; /* the number of the step's backwards that are over */
    bool *is_summed;     /* by parameter: a gradient of the open step is in its sum */
    bool *has_gradient;  /* in the open step; without hooks, all parameters that are not frozen */
    uint32_t *due;       /* the parameters whose gradients the block passes */
    uint32_t due_count;
    uint32_t *saved_items;  /* the engine's items, by the index of the model's saved tensors */
    uint32_t saved_next;    /* tensors below this index have not been fetched yet */
    uint32_t saved_back;    /* how many of the part's tensors backward still waits for */
    uint64_t fetched_bytes; /* the size of the tensors fetched and not dropped yet */
    uint32_t *handles;      /* the number of handles that this thread has, by unit */
    struct lh_sim_train_times times[LH_SIM_STEP_COUNT_MAX]; /* step s is at s % MAX */
};

/*
 * Initialize a training thread.
 *
 * Owns:   *train owns its tables; release with lh_sim_train_deinit().
 * Errors: -ENOMEM; nothing is owned then.
 */
int lh_sim_train_init(struct lh_sim_train *train, const struct lh_sim_train_opts *opts,
                      struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_train_deinit(struct lh_sim_train *train, struct lh_alloc *alloc);
/* Advance as far as possible at the current time. Returns true if anything happened. */
bool lh_sim_train_poll(struct lh_sim_train *train);

#endif
