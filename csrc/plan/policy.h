/*
 * Policies: how a plan is chosen, by name.
 *
 *      zero       inter-block activations to main memory, the others recomputed
 *      capuchin   layers kept while the GPU has room, then swapped to main memory while that hides
 *                 behind computation, the others recomputed: sees GPU and link alone
 *      g10        the last layers kept while the GPU has room, all others swapped to SSD
 *      cpu_act    as lohan, with main memory alone for what is swapped
 *      naive      as lohan; updates read, compute and write one after the other
 *      fuyou      Fuyou's cost model and its two queues
 *      lohan      Algorithm 1: to main memory what fits there, to SSD the rest
 *      auto       lohan's own: what the timeline says is fastest (csrc/plan/auto.c)
 *
 * Checkmate's integer program is python/lohan/planning/_checkmate.py.
 *
 * "auto/eager/ssd/moved", or any of the three behind auto, shows what each is worth: no update is
 * deferred, no states stay in main memory, no activations on the GPU.
 *
 * All have the states on SSD and update in backward, but auto. Main memory and GPU memory that the
 * buffers of a step need are not there for activations.
 *
 * Pure; includes base only.
 * Source: LoHan V-D, V-E (the policies), Fuyou 4.5.
 */
#ifndef LH_PLAN_POLICY_H
#define LH_PLAN_POLICY_H

#include "plan/choice.h"
#include "plan/cost_lohan.h"
#include "plan/timeline.h"

struct lh_plan {
    struct lh_plan_choice choice;
    struct lh_plan_step step; /* what the timeline says of it */
    enum lh_cost_case kind;   /* of Algorithm 1; NONE: the policy does not use it */
    double policy_s;          /* a step by the policy's own cost model; 0: it has none */
};

/* What a policy plans with, and for. */
struct lh_plan_ask {
    bool is_eager; /* auto does without what the three words say */
    bool is_ssd;
    bool is_moved;
    const struct lh_plan_model *model;
    const struct lh_plan_machine *machine;
    struct lh_plan_totals totals;
    uint64_t host_bytes; /* behind the buffers of a step */
    uint64_t gpu_bytes;  /* behind those, and what is on its way */
    uint32_t *order;     /* lh_cost_lohan_order() of the model */
    struct lh_plan_timeline timeline;
    struct lh_alloc *alloc;
};

/* The names, in the order of the table above; NULL ends them. */
const char *const *lh_plan_policy_names(void);

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

/*
 * What the timeline says of a choice that passed its check, whether it fits or not.
 *
 * Errors: -ENOMEM; *step_out is zeroed then.
 */
int lh_plan_step_make(struct lh_plan_step *step_out, const struct lh_plan_choice *choice,
                      const struct lh_plan_model *model, const struct lh_plan_machine *machine,
                      struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;

/*
 * Layers to be swapped (LH_PLAN_FATE_SWAP_SSD) to main memory instead, in forward order while
 * host_bytes last; returns what is left of these.
 */
uint64_t lh_plan_places_fill(struct lh_plan_choice *choice, const struct lh_plan_model *model,
                             uint64_t host_bytes);
/* Layers to be swapped stay on the GPU, from the last one on while gpu_bytes last. */
void lh_plan_last_keep(struct lh_plan_choice *choice, const struct lh_plan_model *model,
                       uint64_t gpu_bytes);
/*
 * What `auto` makes least, in seconds: a step's length, and for what the timeline does not see
 * (latencies, requests in each other's way, buffers) parts of the time that SSDs are busy, more of
 * that with activations, of the time that the link moves these, and of the time in which it would
 * move what stays on the GPU instead, where it takes the room of parameters.
 */
double lh_plan_auto_cost_s(const struct lh_plan_step *step, const struct lh_plan_machine *machine);
/*
 * The policy `auto`: a better choice than the one given, if the search finds one whose step takes
 * no longer than limit_s.
 *
 * Errors: -ENOMEM; the choice is as it was.
 */
int lh_plan_auto(struct lh_plan_choice *choice, double limit_s, struct lh_plan_ask *ask,
                 struct lh_error *err) LH_MUST_CHECK;

#endif
