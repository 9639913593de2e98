/*
 * What training has to give: the same model in plain memory, updated in order by the definition of
 * AdamW (the "ref" kernel of compute/adam.h), with gradients that are a function of seed, step,
 * parameter and element alone.
 *
 * The reference keeps how everything was after each of the last steps, because a store may open at
 * one of them.
 *
 * Thread: one.
 */
#ifndef LH_SIM_REFERENCE_H
#define LH_SIM_REFERENCE_H

#include "sim/model.h"

#define LH_SIM_SNAPSHOT_COUNT 16

/* What the caller changed in a step after it was committed, and how far that is. */
enum lh_sim_edit {
    LH_SIM_EDIT_NONE = 0,
    LH_SIM_EDIT_STAGED,     /* the store has what was before it */
    LH_SIM_EDIT_COMMITTING, /* it has one or the other */
    LH_SIM_EDIT_COMMITTED,  /* it has the edit */
};

struct lh_sim_snapshot {
    uint64_t step;
    uint8_t *state; /* NULL: no step was here yet */
    enum lh_sim_edit edit;
    uint8_t *before; /* of an edit: the state without it */
    uint64_t *param_steps;
};

struct lh_sim_reference {
    const struct lh_sim_model *model; /* borrowed until deinit */
    struct lh_alloc *alloc;
    uint64_t seed;
    uint64_t *offsets; /* of each unit's arrays in a state: LH_SIM_ARRAY_COUNT a unit */
    uint64_t state_bytes;
    uint64_t step; /* of the newest snapshot: step s is at s % LH_SIM_SNAPSHOT_COUNT */
    struct lh_sim_snapshot snapshots[LH_SIM_SNAPSHOT_COUNT];
    void *gradient; /* scratch: of the largest parameter */
};

/*
 * Random masters, moments of zeros, step 0.
 *
 * Owns:   *reference owns its tables; release with lh_sim_reference_deinit().
 * Errors: -ENOMEM; nothing is owned then.
 */
int lh_sim_reference_init(struct lh_sim_reference *reference, const struct lh_sim_model *model,
                          uint64_t seed, struct lh_alloc *alloc, struct lh_error *err)
    LH_MUST_CHECK;
void lh_sim_reference_deinit(struct lh_sim_reference *reference);
/* Bytes of an array after step, which is one of the last: asserted. */
const uint8_t *lh_sim_reference_array(const struct lh_sim_reference *reference, uint64_t step,
                                      uint32_t unit, enum lh_sim_array array);
/* The same; without the step's edit unless is_edited. */
const uint8_t *lh_sim_reference_array_of(const struct lh_sim_reference *reference, uint64_t step,
                                         bool is_edited, uint32_t unit, enum lh_sim_array array);
bool lh_sim_reference_is_edited(const struct lh_sim_reference *reference, uint64_t step);
/*
 * The caller begins to change the last step, which is committed: once a step at most. Then its
 * changes; and when they are committed, before that and after it (COMMITTING, COMMITTED).
 */
void lh_sim_reference_edit_begin(struct lh_sim_reference *reference);
/* New values for count elements from first on in an array of a trainable unit. */
void lh_sim_reference_edit(struct lh_sim_reference *reference, uint32_t unit,
                           enum lh_sim_array array, uint64_t first, uint64_t count, uint64_t seed);
void lh_sim_reference_edit_set(struct lh_sim_reference *reference, enum lh_sim_edit edit);
/* The gradient of param in step, in the model's dtype for it. */
void lh_sim_reference_gradient(const struct lh_sim_reference *reference, uint64_t step,
                               uint32_t param, void *gradient_out);
/* One more step: has_gradient[i] of each parameter. */
void lh_sim_reference_advance(struct lh_sim_reference *reference, const bool *has_gradient);
/* Back to one of the last steps: a store was opened there. */
void lh_sim_reference_return(struct lh_sim_reference *reference, uint64_t step);
/* Back to the masters: there is to be a new store. */
void lh_sim_reference_begin_again(struct lh_sim_reference *reference);
/*
 * Compare what a store holds with its step here, every array of every unit: with or without an
 * edit of the step, as far as that is. may_be_older: a fault explains that a committed edit is not
 * there. What it holds is the step from here on.
 *
 * Errors: -EILSEQ and others (the store's own, it reports what is wrong), -EPROTO (it gives wrong
 *         bytes and does not know), -ENOMEM.
 */
int lh_sim_reference_compare(struct lh_sim_reference *reference, struct lh_store *store,
                             bool may_be_older, struct lh_error *err) LH_MUST_CHECK;
/* The same with a state of all arrays, or with zeros (NULL), and no edit. */
int lh_sim_reference_compare_with(const struct lh_sim_reference *reference, struct lh_store *store,
                                  const uint8_t *state, struct lh_error *err) LH_MUST_CHECK;
/* A state of all arrays: what a store has that is at that step. */
const uint8_t *lh_sim_reference_committed(const struct lh_sim_reference *reference, uint64_t step);

#endif
