/*
 * Models for the simulator: blocks in forward order, the units that they use, and their times.
 *
 * A model has what csrc/py would pass to the engine for a torch module, and the extents and groups
 * of its store. A unit may be used by several blocks (an embedding that is also the head): its
 * gradient is passed by the first of them, which backward reaches last.
 *
 * Thread: one.
 */
#ifndef LH_SIM_MODEL_H
#define LH_SIM_MODEL_H

#include "sched/engine.h"
#include "sim/world.h"

#define LH_SIM_BLOCK_UNIT_COUNT_MAX 4
#define LH_SIM_GROUP_COUNT 2
#define LH_SIM_ARRAY_COUNT 4
/* The maximum number of packed parameters of a unit. */
#define LH_SIM_PACK_COUNT_MAX 4
/* The maximum size of the caller's part of a commit: the default, and the limit for any model. */
#define LH_SIM_SCALAR_BYTES 64
#define LH_SIM_SCALAR_BYTES_MAX (2 * LH_BLOCK_BYTES + 100)

/* The arrays of a unit: R only for bf16 and fp16, M and V only for trainable units. */
enum lh_sim_array {
    LH_SIM_ARRAY_PARAM = 0,
    LH_SIM_ARRAY_RESIDUAL,
    LH_SIM_ARRAY_MOMENT1,
    LH_SIM_ARRAY_MOMENT2,
};

struct lh_sim_block {
    uint32_t units[LH_SIM_BLOCK_UNIT_COUNT_MAX];
    uint32_t unit_count;
    uint64_t forward_ns; /* the sum over the block's parts */
    uint64_t backward_ns;
    uint32_t part_first; /* an index into the model's parts[] */
    uint32_t part_count;
    /* Device memory for saved tensors in transit while the block computes. */
    uint64_t saved_room_bytes;
};

/* A part of a block's computation, in the order of forward. */
struct lh_sim_part {
    uint64_t forward_ns;
    uint64_t backward_ns;
    /* The tensors that this part's forward offloads and its backward fetches, in saved[]. */
    uint32_t saved_first;
    uint32_t saved_count;
};

/* A saved tensor, or several combined, that is offloaded between forward and backward. */
struct lh_sim_saved {
    uint64_t bytes;
    enum lh_saved_tier tier;
};

struct lh_sim_model_opts {
    uint32_t unit_max;
    uint32_t param_max;
    uint32_t block_max;
    uint32_t saved_max;
    uint32_t part_max;   /* 0: one per block */
    uint32_t scales_max; /* extents with scales of moments */
    uint32_t packed_max; /* packed units */
};

/* A frozen unit that is read in place from quantized files, each of which has one unit. */
struct lh_sim_packed {
    struct lh_in_place_run run;
    struct lh_in_place_pack packs[LH_SIM_PACK_COUNT_MAX];
};

struct lh_sim_model {
    struct lh_alloc *alloc;
    struct lh_sim_model_opts opts;
    struct lh_engine_unit *units;
    uint32_t unit_count;
    struct lh_engine_param *params;
    uint32_t param_count;
    struct lh_sim_block *blocks;
    uint32_t block_count;
    struct lh_sim_part *parts;
    uint32_t part_count;
    struct lh_sim_saved *saved; /* in the order of forward */
    uint32_t saved_count;
    struct lh_store_extent_desc *extents;
    uint32_t extent_count;
    struct lh_in_place_unit *in_place; /* the packed units */
    struct lh_sim_packed *packed;      /* the same units */
    struct lh_in_place_file *files;
    uint32_t packed_count;
    struct lh_store_group_desc *groups; /* one per unit */
    bool has_mixed_gradients;           /* some gradients are fp32: lh_sim_model_gradient_dtype() */
    bool has_sums;                      /* gradients are summed in fp32 before they are passed */
    uint64_t element_count;             /* trainable elements, without padding */
    uint64_t scalar_bytes_max; /* of the caller's part of a commit, up to LH_SIM_SCALAR_BYTES_MAX */
};

/*
 * A unit to add: parameters of counts[] elements (bytes if dtype is LH_DTYPE_BYTES: frozen), or a
 * frozen unit of packed parameters, which are read from files that are not the store's.
 */
struct lh_sim_unit_desc {
    enum lh_dtype dtype;
    bool always;
    const uint64_t *counts;
    uint32_t count;
    enum lh_rule rule;             /* of a trained unit */
    enum lh_adam_states states;    /* the same */
    uint64_t work_bytes;           /* of struct lh_engine_unit */
    const struct lh_unpack *packs; /* NULL: the store has the unit */
    uint32_t pack_count;           /* at most LH_SIM_PACK_COUNT_MAX; counts is then ignored */
};

struct lh_sim_budget_opts {
    uint64_t host_bytes;
    enum lh_engine_schedule schedule; /* as for the engine */
    uint64_t commit_every;            /* as for the engine */
    bool has_blocks;                  /* gradients come from an accelerator */
};

/*
 * Initialize a model without blocks.
 *
 * Owns:   *model owns its tables; release with lh_sim_model_deinit(). alloc is borrowed until then.
 * Errors: -ENOMEM; nothing is owned then.
 */
int lh_sim_model_init(struct lh_sim_model *model, const struct lh_sim_model_opts *opts,
                      struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_model_deinit(struct lh_sim_model *model);
/* The number of extents with scales that a unit of moments with scales has, for opts. */
uint64_t lh_sim_model_scales_count(uint64_t elements);
/* The bytes that a load of a unit reads: fewer than it has if it is packed. */
uint64_t lh_sim_model_read_bytes(const struct lh_sim_model *model, uint32_t unit);
/* Add a unit; returns its index. These functions assert that opts has room for what they add. */
uint32_t lh_sim_model_unit_add(struct lh_sim_model *model, const struct lh_sim_unit_desc *desc);
void lh_sim_model_block_add(struct lh_sim_model *model, const struct lh_sim_block *block);
/* Add another part to the block that was added last; its first part has the block's own times. */
void lh_sim_model_part_add(struct lh_sim_model *model, uint64_t forward_ns, uint64_t backward_ns);
/* Add a saved tensor to the part that was added last. */
void lh_sim_model_saved_add(struct lh_sim_model *model, uint64_t bytes, enum lh_saved_tier tier);

/* The size of an array of a unit (0: it has no such array), and its extent. */
uint64_t lh_sim_model_array_bytes(const struct lh_sim_model *model, uint32_t unit,
                                  enum lh_sim_array array);
uint32_t lh_sim_model_extent(const struct lh_sim_model *model, uint32_t unit,
                             enum lh_sim_array array);
/* The hyper-parameters of a group in a step; they change from step to step. */
struct lh_adam_hyper lh_sim_model_hyper(uint32_t group, uint64_t step);
/*
 * Give the states of units to other processes: the store has no extents for them. is_given is by
 * unit, and is ignored for frozen units.
 */
void lh_sim_model_give(struct lh_sim_model *model, const bool *is_given);
/* Whether another process has the unit's states. */
bool lh_sim_model_is_given(const struct lh_sim_model *model, uint32_t unit);
/*
 * The parameter's dtype; with has_mixed_gradients, fp32 for some parameters of some units; with
 * has_sums, fp32 for all parameters whose states are here.
 */
enum lh_dtype lh_sim_model_gradient_dtype(const struct lh_sim_model *model, uint32_t param);
/* Make the caller's part of a step's commit, at most scalar_bytes_max. Returns the size. */
uint64_t lh_sim_model_scalars(const struct lh_sim_model *model, uint64_t step, void *scalars_out);
/* The smallest region, of main memory or of an accelerator, that works for the model's blocks. */
uint64_t lh_sim_model_region_bytes_min(const struct lh_sim_model *model);
/*
 * Like lh_budget_make(), but with a region in which all units of a block fit at once, wherever the
 * units that are already in use are placed: in the worst case, these leave n holes, none of which
 * is large enough. lh_budget_make() gets the units one by one, and cannot take this into account.
 */
int lh_sim_model_budget(const struct lh_sim_model *model, const struct lh_sim_budget_opts *opts,
                        struct lh_budget *budget_out, struct lh_error *err) LH_MUST_CHECK;

#endif
