/*
 * The decisions of a plan: where each layer's activations and each block's states are kept, and
 * when updates run.
 *
 * Pure; includes base only. Thread: a choice belongs to its caller.
 */
#ifndef LH_PLAN_CHOICE_H
#define LH_PLAN_CHOICE_H

#include "plan/model.h"

/* What happens to a layer's activations between its forward and its backward. */
enum lh_plan_fate {
    LH_PLAN_FATE_KEEP = 0,  /* the activations stay on the GPU */
    LH_PLAN_FATE_SWAP_HOST, /* the activations are moved to main memory */
    LH_PLAN_FATE_SWAP_SSD,  /* the activations are moved to SSD, through main memory */
    LH_PLAN_FATE_RECOMPUTE,
};
#define LH_PLAN_FATE_COUNT 4

/* When and how updates run. */
enum lh_plan_schedule {
    LH_PLAN_SCHEDULE_OPTIMIZED = 0, /* in backward; reads, AdamW and writes overlap */
    LH_PLAN_SCHEDULE_NAIVE,         /* in backward; a block is read, updated and then written */
    LH_PLAN_SCHEDULE_SERIAL,        /* after backward; nothing overlaps the updates */
};

struct lh_plan_block_choice {
    bool is_deferred; /* the block's update runs just before its next forward, not in backward */
    /* Which states stay in main memory between steps; all other states are on SSD. */
    bool has_host_p16;
    bool has_host_master; /* the master, or the residual that completes P16 to one */
    bool has_host_moments;
};

struct lh_plan_choice {
    uint8_t *fates; /* enum lh_plan_fate, one per layer */
    struct lh_plan_block_choice *blocks;
    uint32_t layer_count;
    uint32_t block_count;
    enum lh_plan_schedule schedule;
    uint32_t master_bytes; /* per parameter: 4 (the papers' P32), or the model's residual_bytes */
};

/*
 * Initialize a choice: all activations kept, all updates eager, all states on SSD, with the papers'
 * master (P32).
 *
 * Owns:   *choice owns its tables; release with lh_plan_choice_deinit() and the same alloc.
 * Errors: -ENOMEM; nothing is owned then.
 */
int lh_plan_choice_init(struct lh_plan_choice *choice, const struct lh_plan_model *model,
                        struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;
void lh_plan_choice_deinit(struct lh_plan_choice *choice, struct lh_alloc *alloc);
/*
 * Check a choice.
 *
 * Errors: -EINVAL (an inter-block layer is recomputed, or the master's size is neither 4 bytes nor
 *         the model's residual; the message has the numbers).
 */
int lh_plan_choice_check(const struct lh_plan_choice *choice, const struct lh_plan_model *model,
                         struct lh_error *err) LH_MUST_CHECK;
/* Copy a choice; both belong to the same model. */
void lh_plan_choice_copy(struct lh_plan_choice *target, const struct lh_plan_choice *source);

#endif
