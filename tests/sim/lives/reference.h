/*
 * The expected result of training: the same model in plain memory, updated in order by the
 * definition of AdamW (the "ref" kernel of compute/adam.h), with gradients that depend only on
 * seed, step, parameter and element.
 *
 * The reference keeps the state after each of the last steps, because a store may open at any of
 * them.
 *
 * Thread: one.
 */
#ifndef LH_TEST_SIM_REFERENCE_H
#define LH_TEST_SIM_REFERENCE_H

#include "sim/model.h"

#define LH_SIM_SNAPSHOT_COUNT 16

/* The progress of an edit: changes that the caller makes to a step after it was committed. */
enum lh_sim_edit {
    LH_SIM_EDIT_NONE = 0,
    LH_SIM_EDIT_STAGED,     /* the store has the state before the edit */
    LH_SIM_EDIT_COMMITTING, /* the store has the state before or after the edit */
    LH_SIM_EDIT_COMMITTED,  /* the store has the state after the edit */
};

struct lh_sim_snapshot {
    uint64_t step;
    uint8_t *state; /* NULL: not used yet */
    enum lh_sim_edit edit;
    uint8_t *before; /* with an edit: the state before it */
    uint64_t *param_steps;
};

struct lh_sim_reference {
    const struct lh_sim_model *model; /* borrowed until deinit */
    struct lh_alloc *alloc;
    uint64_t seed;
    bool has_scales;        /* gradients are scaled (clipped) by a different factor each step */
    uint32_t process_count; /* 0: gradients are not those of several processes */
    uint32_t skip_ppm;      /* several processes: for each, its gradient of a parameter is absent */
    uint32_t block_skip_ppm; /* the same for each block but the first: it is not used */
    uint64_t *offsets;       /* of every unit's arrays in a state: LH_SIM_ARRAY_COUNT per unit */
    uint64_t state_bytes;
    uint64_t step; /* that of the newest snapshot; step s is at s % LH_SIM_SNAPSHOT_COUNT */
    struct lh_sim_snapshot snapshots[LH_SIM_SNAPSHOT_COUNT];
    void *gradient;     /* scratch space: the size of the largest parameter */
    void *contribution; /* the same */
};

/*
 * Initialize a reference at step 0: random masters, and moments of zeros.
 *
 * Owns:   *reference owns its tables; release with lh_sim_reference_deinit().
 * Errors: -ENOMEM; nothing is owned then.
 */
int lh_sim_reference_init(struct lh_sim_reference *reference, const struct lh_sim_model *model,
                          uint64_t seed, struct lh_alloc *alloc, struct lh_error *err)
    LH_MUST_CHECK;
void lh_sim_reference_deinit(struct lh_sim_reference *reference);
/* The bytes of an array after step. Asserts that step is one of the last ones. */
const uint8_t *lh_sim_reference_array(const struct lh_sim_reference *reference, uint64_t step,
                                      uint32_t unit, enum lh_sim_array array);
/* The same, without the step's edit unless is_edited. */
const uint8_t *lh_sim_reference_array_of(const struct lh_sim_reference *reference, uint64_t step,
                                         bool is_edited, uint32_t unit, enum lh_sim_array array);
bool lh_sim_reference_is_edited(const struct lh_sim_reference *reference, uint64_t step);
/*
 * Begin an edit of the last step, which has been committed: at most once per step. Call
 * lh_sim_reference_edit() for each change, and lh_sim_reference_edit_set() before the commit of the
 * edit (COMMITTING) and after it (COMMITTED).
 */
void lh_sim_reference_edit_begin(struct lh_sim_reference *reference);
/* Set new values for count elements, from first on, in an array of a trainable unit. */
void lh_sim_reference_edit(struct lh_sim_reference *reference, uint32_t unit,
                           enum lh_sim_array array, uint64_t first, uint64_t count, uint64_t seed);
void lh_sim_reference_edit_set(struct lh_sim_reference *reference, enum lh_sim_edit edit);
/* The factor by which the gradients of a step are multiplied. */
double lh_sim_reference_scale(const struct lh_sim_reference *reference, uint64_t step);
/*
 * Several processes: whether a process uses a block in a step, has a gradient of param, and whether
 * any process has. Every process has a gradient of some parameter, if one is trained.
 */
bool lh_sim_reference_uses(const struct lh_sim_reference *reference, uint64_t step, uint32_t rank,
                           uint32_t block);
bool lh_sim_reference_contributes(const struct lh_sim_reference *reference, uint64_t step,
                                  uint32_t rank, uint32_t param);
bool lh_sim_reference_has_gradient(const struct lh_sim_reference *reference, uint64_t step,
                                   uint32_t param);
/* Make a process's gradient of param, in the parameter's dtype. */
void lh_sim_reference_contribution(const struct lh_sim_reference *reference, uint64_t step,
                                   uint32_t rank, uint32_t param, void *gradient_out);
/*
 * Make the gradient of param in step, in its dtype. With several processes it is the sum of theirs,
 * added in fp32 in the order of ranks.
 */
void lh_sim_reference_gradient(const struct lh_sim_reference *reference, uint64_t step,
                               uint32_t param, void *gradient_out);
/* Advance by one step; has_gradient[i] says whether parameter i has a gradient. */
void lh_sim_reference_advance(struct lh_sim_reference *reference, const bool *has_gradient);
/* Go back to one of the last steps, at which a store was opened. */
void lh_sim_reference_return(struct lh_sim_reference *reference, uint64_t step);
/* Go back to the masters, for a new store. */
void lh_sim_reference_begin_again(struct lh_sim_reference *reference);
/*
 * Compare a store with the reference's state of the same step, every array of every unit, with or
 * without the step's edit, depending on the edit's progress. may_be_older: a fault explains that a
 * committed edit is missing. The state that the store has is the step's state from now on.
 *
 * Errors: -EILSEQ and others (the store's own: it detected the damage), -EPROTO (it returned wrong
 *         bytes without noticing), -ENOMEM.
 */
int lh_sim_reference_compare(struct lh_sim_reference *reference, struct lh_store *store,
                             bool may_be_older, struct lh_error *err) LH_MUST_CHECK;
/* Compare with a given state of all arrays, or with zeros (NULL), ignoring edits. */
int lh_sim_reference_compare_with(const struct lh_sim_reference *reference, struct lh_store *store,
                                  const uint8_t *state, struct lh_error *err) LH_MUST_CHECK;
/* The state of all arrays that a store at that step has committed. */
const uint8_t *lh_sim_reference_committed(const struct lh_sim_reference *reference, uint64_t step);

#endif
