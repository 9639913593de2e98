/*
 * Shared by the engine's tests: a small model on a real store, trained by a loop that plays the
 * training thread, and the same training in memory by the definition of the rule.
 *
 * Units: bf16 with two parameters (always resident), fp32 with two, frozen bytes, fp16, fp32, bf16
 * (large: several chunks).
 */
#ifndef LH_TEST_ENGINE_FIXTURE_H
#define LH_TEST_ENGINE_FIXTURE_H

#include "io_faulty.h"
#include "sched/engine.h"

#define RIG_UNIT_COUNT 6
#define RIG_PARAM_COUNT 8
#define RIG_GROUP_COUNT 2
#define RIG_EXTENT_COUNT_MAX 24
#define RIG_STEP_COUNT_MAX 64
/* The fifth parameter is frozen. */
#define RIG_GRADIENTS_ALL 0xefu
#define RIG_WAIT_S 60

struct rig_opts {
    bool large;        /* the last unit has more than one chunk */
    bool least_memory; /* the minimum; otherwise as much memory as is useful */
    enum lh_engine_schedule schedule;
    bool skip_verify; /* do not check checksums */
    uint64_t commit_every;
    uint32_t directory_count;
    bool in_memory;        /* the store is on tmpfs, where syncs cost nothing: for many rounds */
    const char *device;    /* (optional) the kind of accelerator: see rig_device.h */
    uint64_t device_bytes; /* device memory for parameters */
    bool units_in_memory;  /* with device "fake": it reads parameters in main memory */
    uint64_t spare_bytes;  /* with least_memory: the memory beyond the minimum */
    uint64_t beside_bytes; /* the caller's room after each unit, in the memory that computes */
    bool norms;
    bool repeats;         /* with norms: steps may be repeated (rig_repeat.h) */
    uint64_t saved_bytes; /* main memory for saved tensors (rig_saved.h) */
    uint64_t saved_transit_bytes;
    uint64_t saved_ssd_bytes;
    uint32_t saved_item_max;
    bool in_place;       /* the frozen unit is in separate files (rig_in_place.h) */
    bool packed;         /* with in_place: the files hold quantized parameters */
    bool kept;           /* with packed: the packed bytes stay in main memory */
    bool kept_short;     /* with kept: the memory for them is a block too small */
    bool in_place_large; /* the frozen unit is so large that it takes several requests */
    /* there are no threads: the engine runs while the rig waits (rig_wait.h) */
    bool manual;
    /* gradients have the parameters' dtypes, as in torch; they may wait on SSD */
    bool plain_gradients;
    uint32_t team_mates;       /* the rig owns a team with as many mates (rig_team.h) */
    const struct rig *team_of; /* the rig is a mate of this one, with the number team_mate */
    uint32_t team_mate;
    uint64_t gather_wait_ns; /* the rigs of the team gather units: see lh_engine_opts */
    unsigned given;          /* bits of units whose states another process has */
    bool sums;               /* with device: the test gives gradients to lh_sum_post() */
    uint64_t tail_bytes;     /* with device: the most that the test gives to lh_tail_post() */
    unsigned announced;      /* bits of units whose uses are announced */
    unsigned family;     /* bits of units that owe steps in which others of them have gradients */
    bool given_late;     /* the test itself calls lh_given_arrived() after a close */
    unsigned matrices;   /* bits of units that Muon updates; the others have AdamW */
    uint64_t model_seed; /* sizes and dtypes are random, by this seed; 0: the model above */
};

/* The kinds of work that a manual rig's backends (rig_inline.h) currently hold back. */
struct rig_holds {
    bool jobs;
    uint32_t requests; /* bits LH_IO_FAULT_ON(kind) */
    uint32_t copies;   /* bits 1 << direction */
};

struct rig_device;
struct rig_saved;
struct rig_in_place;
struct rig_repeat;

struct rig {
    struct rig_opts opts;
    const char *name;
    struct rig_holds holds;
    void (*watch)(struct rig *rig); /* (optional) called after each round of a manual engine */
    void *watch_context;
    unsigned unused;       /* bits of units that forward and backward do not use */
    unsigned unchecked;    /* bits of units that rig_check_store() does not compare */
    struct lh_alloc alloc; /* the allocator for everything except the engine */
    struct lh_alloc engine_alloc;
    struct lh_engine_unit units[RIG_UNIT_COUNT];
    struct lh_engine_param params[RIG_PARAM_COUNT];
    struct lh_adam_hyper hypers[RIG_GROUP_COUNT];
    struct lh_budget budget;
    struct lh_clock clock;
    struct lh_waker waker;
    struct lh_store *store;
    struct lh_io *io; /* the faulty backend, which wraps threads */
    struct lh_exec *exec;
    struct lh_engine *engine;
    struct rig_device *device;     /* NULL: no accelerator */
    struct rig_saved *saved;       /* NULL: no saved tensors */
    struct rig_repeat *repeat;     /* NULL: steps are not repeated */
    struct rig_in_place *in_place; /* NULL: the unit is in the store */
    struct lh_team *team;          /* NULL: no other engine shares parameters */
    uint8_t *memory;
    uint64_t memory_bytes;
    void *gradients[RIG_PARAM_COUNT];
    /* The result of training in memory: all arrays of all units, and copies after each step. */
    uint8_t *state;
    uint64_t state_bytes;
    uint64_t param_steps[RIG_PARAM_COUNT];
    uint64_t step;
    double factor; /* of the gradients of the step that is closed next; 0: 1 */
    struct lh_adam_hyper history[RIG_STEP_COUNT_MAX][RIG_GROUP_COUNT]; /* of closed steps */
    uint8_t *snapshots[RIG_STEP_COUNT_MAX];
};

/* Make a store with random values, committed as step 0, and an engine on it. */
void rig_make(struct rig *rig, const char *name, struct rig_opts opts);
/* End the engine without a flush, and close the store. */
void rig_shut(struct rig *rig);
/* Shut down and free everything, and check for leaks. */
void rig_unmake(struct rig *rig);
/*
 * After rig_shut: open the store and check that it has the expected step. Training continues from
 * it.
 */
void rig_reopen(struct rig *rig);
/* Fill only the engine's options, for tests that create the engine themselves. */
struct lh_engine_opts rig_engine_opts(struct rig *rig);

/* The gradients' dtype: fp32 for some parameters of bf16. */
enum lh_dtype rig_gradient_dtype(const struct rig *rig, uint32_t param);

/*
 * Run one training step; gradients has one bit per parameter. Every unit's bytes are checked in
 * forward and in backward. Returns 0, or the engine's error (-errno).
 */
int rig_step(struct rig *rig, unsigned gradients);
/* Begin a use of a unit, wait for it, and check its bytes; lh_engine_unpin() ends it. */
int rig_acquire(struct rig *rig, uint32_t unit);
/* The parts of a step: until all gradients are passed; close. */
int rig_forward_backward(struct rig *rig, unsigned gradients);
int rig_backward(struct rig *rig, unsigned gradients);
int rig_close(struct rig *rig, unsigned gradients);
/* After a close: the new values of given units, which are their gradients, are there. */
void rig_give(struct rig *rig, unsigned gradients);
int rig_forward(struct rig *rig, enum lh_engine_mode mode);
int rig_flush(struct rig *rig, bool commit);
int rig_abort(struct rig *rig);

/* Check that every array on disk is that of step; the engine was flushed, or does not exist. */
void rig_check_store(struct rig *rig, uint64_t step);

#endif
