/*
 * Policies: how a plan is chosen, by name.
 *
 *      lohan    inter-block activations are swapped, and of the others those that Algorithm 1 says;
 *               to main memory what fits there, to SSD the rest. Updates in backward.
 *
 * Main memory that buffers need (lh_plan_memory) is not there for activations.
 *
 * Pure; includes base only.
 * Source: LoHan IV-D, LoHan V-E (what it is compared with).
 */
#ifndef LH_PLAN_POLICY_H
#define LH_PLAN_POLICY_H

#include "plan/choice.h"
#include "plan/cost_lohan.h"
#include "plan/machine.h"
#include "plan/model.h"

struct lh_plan {
    struct lh_plan_choice choice;
    enum lh_cost_case kind; /* of Algorithm 1; NONE: the policy does not use it */
    /* What its own cost model says of a step; 0: it has none. */
    double iteration_s;
};

/* The names, in the order of the table above; NULL ends them. */
const char *const *lh_plan_policy_names(void);

/* Main memory that the buffers of a step need, before any activation or state stays there. */
uint64_t lh_plan_host_working_bytes(const struct lh_plan_model *model);

/*
 * Plan for a model and a machine that passed their checks.
 *
 * Owns:   *plan owns its choice; release with lh_plan_deinit() and the same alloc.
 * Errors: -EINVAL (no policy has that name: the message has all), -ENOMEM, -ENOSPC (the policy
 *         cannot run the model on the machine: what is missing, with the numbers).
 */
int lh_plan_make(struct lh_plan *plan, const struct lh_plan_model *model,
                 const struct lh_plan_machine *machine, const char *policy, struct lh_alloc *alloc,
                 struct lh_error *err) LH_MUST_CHECK;
void lh_plan_deinit(struct lh_plan *plan, struct lh_alloc *alloc);

#endif
