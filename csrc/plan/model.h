/*
 * The planner's description of a model and a batch: layers in forward order, grouped into blocks.
 *
 *      block 0            block 1                           block n - 1
 *      embedding          qkv attention h->h h->4h 4h->h    head
 *
 * A layer is recomputed as a whole or not at all. Its activations are everything that its
 * operations saved for backward, including its output, each counted once. The activations of an
 * inter-block layer are the next block's input: recomputation starts from them, so they are kept or
 * swapped, never recomputed. A layer that saves nothing has nothing to recompute.
 *
 * A parameter belongs to the layer that uses it first; a tied parameter is counted only there.
 *
 * Frozen parameters have neither states nor gradients. What a load of them reads may be less than
 * what computation needs, because files may have them in a packed form (sched/in_place.h).
 *
 * Pure; includes base only. Thread: a model belongs to its caller.
 * Source: LoHan IV-B (what a profile yields per layer), LoHan IV-D (layers as units of swapping).
 */
#ifndef LH_PLAN_MODEL_H
#define LH_PLAN_MODEL_H

#include "base/alloc.h"
#include "base/error.h"

#define LH_PLAN_BLOCK_NONE UINT32_MAX

/* The parameters whose moments share scales, if they have 8 bits (compute/adam_states.h). */
#define LH_PLAN_MOMENT_BLOCK 64
/* AdamW's moments of them in fp32: the most that a rule has, and what the papers count. */
#define LH_PLAN_MOMENT_BLOCK_BYTES_F32 (8 * LH_PLAN_MOMENT_BLOCK)

struct lh_plan_layer {
    uint64_t param_count;    /* trained parameters */
    uint64_t others_count;   /* those of them that have AdamW's moments whatever the rule is */
    uint64_t products_count; /* of parameters that AdamW updates while products of matrices take */
    uint64_t frozen_bytes;   /* frozen parameters, in the form in which they are computed with */
    uint64_t frozen_read_bytes; /* the bytes that a load of them reads from SSD */
    uint64_t forward_flop;      /* the FLOP for the whole batch; recomputation costs the same */
    uint64_t frozen_flop; /* the part of it whose backward costs as much, and not twice as much */
    uint64_t activation_bytes; /* the size for the whole batch */
    uint64_t working_bytes;    /* GPU memory used while computing, beyond its activations */
    bool is_inter_block;
};

struct lh_plan_block {
    uint32_t layer_first;
    uint32_t layer_count;
    uint32_t shared_block; /* an earlier block with parameters used here (tied), or .._BLOCK_NONE */
};

struct lh_plan_model {
    struct lh_plan_layer *layers;
    struct lh_plan_block *blocks;
    uint32_t layer_count;
    uint32_t block_count;
    uint32_t param_bytes;    /* per parameter, in the compute dtype: 2, or 4 (fp32) */
    uint32_t residual_bytes; /* what each fp32 master needs in addition: 2 (bf16), 4 (fp16), 0 */
    /* The moments of LH_PLAN_MOMENT_BLOCK parameters, with their scales; 0: the rule has none. */
    uint32_t moment_block_bytes;
};

/* Sums over a model. */
struct lh_plan_totals {
    uint64_t param_count;  /* P, the trained ones */
    uint64_t update_count; /* the parameters that AdamW would update in the time of updates */
    uint64_t frozen_bytes;
    uint64_t frozen_read_bytes;
    uint64_t forward_flop; /* FLOP_f */
    uint64_t backward_flop;
    uint64_t moments_less_bytes;           /* what moments have less than AdamW's in fp32 */
    uint64_t activation_bytes;             /* A_all */
    uint64_t inter_block_activation_bytes; /* A_interBlock */
    uint64_t block_param_count_max;
    uint64_t block_bytes_max; /* a block's parameters, frozen ones included */
    uint64_t block_activation_bytes_max;
    uint64_t block_gpu_bytes_max; /* a block's activations plus the largest working_bytes in it */
};

/*
 * Make a model of zeroed layers and blocks, for the caller to fill in; its moments are AdamW's in
 * fp32.
 *
 * Owns:   *model owns its tables; release with lh_plan_model_deinit() and the same alloc.
 * Errors: -ENOMEM; nothing is owned then.
 */
int lh_plan_model_init(struct lh_plan_model *model, uint32_t block_count, uint32_t layer_count,
                       struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;
void lh_plan_model_deinit(struct lh_plan_model *model, struct lh_alloc *alloc);

/*
 * Check a model.
 *
 * Errors: -EINVAL (no layers, a block that does not continue where the previous one ends, a shared
 *         block that does not come earlier, sums above 2^60; the message has the numbers).
 */
int lh_plan_model_check(const struct lh_plan_model *model, struct lh_error *err) LH_MUST_CHECK;

/* The sums over a model that passed the check. */
struct lh_plan_totals lh_plan_model_totals(const struct lh_plan_model *model);
/* The number of parameters of one block. */
uint64_t lh_plan_block_param_count(const struct lh_plan_model *model, uint32_t block);
/* The number of parameters that AdamW would update in the time of one block's update. */
uint64_t lh_plan_block_update_count(const struct lh_plan_model *model, uint32_t block);
/* The bytes of the moments of one block. */
uint64_t lh_plan_block_moment_bytes(const struct lh_plan_model *model, uint32_t block);
/* The bytes of one block's frozen parameters, and what a load of them reads. */
uint64_t lh_plan_block_frozen_bytes(const struct lh_plan_model *model, uint32_t block);
uint64_t lh_plan_block_frozen_read_bytes(const struct lh_plan_model *model, uint32_t block);
/* The bytes of the rule's moments of param_count parameters, rounded up. */
uint64_t lh_plan_moment_bytes(const struct lh_plan_model *model, uint64_t param_count);

#endif
