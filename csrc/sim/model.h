/*
 * Models for the simulator: blocks in forward order, the units that they use, their times.
 *
 * A model is what csrc/py would tell the engine of a torch module, and the extents and groups of
 * its store. A unit may be used by several blocks (an embedding that is the head as well): its
 * gradient is given by the first of them, which backward reaches last.
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
/* What the caller's part of a commit may have, unless the model says more; and the most. */
#define LH_SIM_SCALAR_BYTES 64
#define LH_SIM_SCALAR_BYTES_MAX (2 * LH_BLOCK_BYTES + 100)

/* The arrays of a unit; R is there for bf16 units, M and V for trainable ones. */
enum lh_sim_array {
    LH_SIM_ARRAY_PARAM = 0,
    LH_SIM_ARRAY_RESIDUAL,
    LH_SIM_ARRAY_MOMENT1,
    LH_SIM_ARRAY_MOMENT2,
};

struct lh_sim_block {
    uint32_t units[LH_SIM_BLOCK_UNIT_COUNT_MAX];
    uint32_t unit_count;
    uint64_t forward_ns; /* of all its parts */
    uint64_t backward_ns;
    uint32_t part_first; /* in the model's parts[] */
    uint32_t part_count;
    /* Of the accelerator's memory, while it computes: for saved tensors that leave or come back. */
    uint64_t saved_room_bytes;
};

/* A stretch of a block's computation, in the order of forward. */
struct lh_sim_part {
    uint64_t forward_ns;
    uint64_t backward_ns;
    /* What its forward puts and its backward fetches, in the model's saved[]. */
    uint32_t saved_first;
    uint32_t saved_count;
};

/* A saved tensor, or many as one, that leaves the accelerator between forward and backward. */
struct lh_sim_saved {
    uint64_t bytes;
    enum lh_saved_tier tier;
};

struct lh_sim_model_opts {
    uint32_t unit_max;
    uint32_t param_max;
    uint32_t block_max;
    uint32_t saved_max;
    uint32_t part_max; /* 0: one a block */
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
    struct lh_store_group_desc *groups; /* one a unit */
    uint64_t element_count;             /* trainable, without padding */
    /* Gradients have their parameters' dtype: no wider ones leave an accelerator. */
    bool has_own_gradients;
    bool has_scales;           /* gradients are clipped: scaled, by another number each step */
    uint64_t scalar_bytes_max; /* of the caller's part of a commit, up to LH_SIM_SCALAR_BYTES_MAX */
};

/* A unit to be: parameters of counts[] elements (bytes where dtype is LH_DTYPE_BYTES: frozen). */
struct lh_sim_unit_desc {
    enum lh_dtype dtype;
    bool always;
    const uint64_t *counts;
    uint32_t count;
};

struct lh_sim_budget_opts {
    uint64_t host_bytes;
    enum lh_engine_schedule schedule; /* the engine's */
    uint64_t commit_every;            /* and this */
    bool has_blocks;                  /* gradients come from an accelerator */
};

/*
 * A model without blocks.
 *
 * Owns:   *model owns its tables; release with lh_sim_model_deinit(). alloc is borrowed until then.
 * Errors: -ENOMEM; nothing is owned then.
 */
int lh_sim_model_init(struct lh_sim_model *model, const struct lh_sim_model_opts *opts,
                      struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_model_deinit(struct lh_sim_model *model);
/* Returns the unit's index. More than opts has room for: asserted, as in the next one. */
uint32_t lh_sim_model_unit_add(struct lh_sim_model *model, const struct lh_sim_unit_desc *desc);
void lh_sim_model_block_add(struct lh_sim_model *model, const struct lh_sim_block *block);
/* Another part of the block that was added last, which has one of its own times. */
void lh_sim_model_part_add(struct lh_sim_model *model, uint64_t forward_ns, uint64_t backward_ns);
/* Of the part that was added last. */
void lh_sim_model_saved_add(struct lh_sim_model *model, uint64_t bytes, enum lh_saved_tier tier);

struct lh_sim_sizes {
    uint64_t count_max; /* elements of a parameter */
    uint32_t large_ppm; /* of the models: one unit has two chunks where memory is scarce */
};

/* A small one by seed. Errors: -ENOMEM. */
int lh_sim_model_random(struct lh_sim_model *model, const struct lh_sim_sizes *sizes,
                        struct lh_sim_random *random, struct lh_alloc *alloc, struct lh_error *err)
    LH_MUST_CHECK;

/* Bytes of an array of a unit (0: it has none), and its extent. */
uint64_t lh_sim_model_array_bytes(const struct lh_sim_model *model, uint32_t unit,
                                  enum lh_sim_array array);
uint32_t lh_sim_model_extent(const struct lh_sim_model *model, uint32_t unit,
                             enum lh_sim_array array);
/* Hyper-parameters of a group in a step: they change from step to step. */
struct lh_adam_hyper lh_sim_model_hyper(uint32_t group, uint64_t step);
/* What the gradients of a step are multiplied with. */
double lh_sim_model_scale(const struct lh_sim_model *model, uint64_t step);
/* The caller's part of a step's commit: at most model->scalar_bytes_max. Returns its bytes. */
uint64_t lh_sim_model_scalars(const struct lh_sim_model *model, uint64_t step, void *scalars_out);
/* The parameters' own; but for has_own_gradients, fp32 for some of every third unit. */
enum lh_dtype lh_sim_model_gradient_dtype(const struct lh_sim_model *model, uint32_t param);
/* The least region, of main memory or of an accelerator, that works for the model's blocks. */
uint64_t lh_sim_model_region_bytes_min(const struct lh_sim_model *model);
/*
 * As lh_budget_make(), with a region in which every block's units fit at once wherever those of
 * them that are in use already lie: n holes, none large enough, are as bad as it gets. The budget
 * is given the units one by one, and so cannot see to that.
 */
int lh_sim_model_budget(const struct lh_sim_model *model, const struct lh_sim_budget_opts *opts,
                        struct lh_budget *budget_out, struct lh_error *err) LH_MUST_CHECK;

#endif
