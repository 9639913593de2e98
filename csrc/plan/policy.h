/*
 * Planning policies, selected by name.
 *
 *      zero       inter-block activations go to main memory; all others are recomputed
 *      capuchin   layers are kept while the GPU has room, then swapped to main memory while
 *                 computation hides that; all others are recomputed: considers GPU and link only
 *      g10        the last layers are kept while the GPU has room; all others are swapped to SSD
 *      cpu_act    like lohan, but swaps to main memory only
 *      naive      like lohan; an update reads, computes and writes one after the other
 *      fuyou      Fuyou's cost model and its two queues
 *      lohan      Algorithm 1: swaps to main memory what fits there, the rest to SSD
 *      auto       lohan's own: the fastest choice by the timeline (csrc/plan/auto.c)
 *
 * Checkmate's integer program is in benchmarks/lab/checkmate.py.
 *
 * "auto" takes up to three suffixes, each of which disables one of its techniques to show how much
 * that technique saves ("auto/eager/ssd/moved" disables all three): "eager" defers no updates,
 * "ssd" keeps no states in main memory, "moved" keeps no activations on the GPU.
 *
 * All policies except auto keep the states on SSD and update in backward. Activations cannot use
 * the main memory and GPU memory that the buffers of a step need.
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
    struct lh_plan_step step; /* the timeline's estimate */
    enum lh_cost_case kind;   /* the case of Algorithm 1; NONE: the policy does not use it */
    double policy_s;          /* a step by the policy's own cost model; 0: there is no such model */
};

/* The input of a policy. */
struct lh_plan_ask {
    bool is_eager; /* this and the next two: the suffixes of auto */
    bool is_ssd;
    bool is_moved;
    const struct lh_plan_model *model;
    const struct lh_plan_machine *machine;
    struct lh_plan_totals totals;
    uint64_t host_bytes; /* main memory that the buffers of a step leave free */
    uint64_t gpu_bytes;  /* GPU memory that buffers and activations in transit leave free */
    uint32_t *order;     /* lh_cost_lohan_order() of the model */
    struct lh_plan_timeline timeline;
    struct lh_alloc *alloc;
};

/* The names, in the order of the table above, terminated by NULL. */
const char *const *lh_plan_policy_names(void);

/*
 * Make a plan for a model and a machine that passed their checks.
 *
 * Owns:   *plan owns its choice; release with lh_plan_deinit() and the same alloc.
 * Errors: -EINVAL (unknown policy: the message lists all names), -ENOMEM, -ENOSPC (the policy
 *         cannot run the model on the machine: the message says what is missing, with numbers).
 */
int lh_plan_make(struct lh_plan *plan, const struct lh_plan_model *model,
                 const struct lh_plan_machine *machine, const char *policy, struct lh_alloc *alloc,
                 struct lh_error *err) LH_MUST_CHECK;
void lh_plan_deinit(struct lh_plan *plan, struct lh_alloc *alloc);

/*
 * Estimate a step of a choice that passed its check, whether it fits or not.
 *
 * Errors: -ENOMEM; *step_out is zeroed then.
 */
int lh_plan_step_make(struct lh_plan_step *step_out, const struct lh_plan_choice *choice,
                      const struct lh_plan_model *model, const struct lh_plan_machine *machine,
                      struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;

/*
 * Move layers that would be swapped to SSD (LH_PLAN_FATE_SWAP_SSD) to main memory instead, in
 * forward order: each layer that fits into what is left of host_bytes. Returns what remains.
 */
uint64_t lh_plan_places_fill(struct lh_plan_choice *choice, const struct lh_plan_model *model,
                             uint64_t host_bytes);
/*
 * Keep layers that would be swapped on the GPU, from the last one backwards, until one does not fit
 * into what is left of gpu_bytes.
 */
void lh_plan_last_keep(struct lh_plan_choice *choice, const struct lh_plan_model *model,
                       uint64_t gpu_bytes);
/*
 * The cost in seconds that `auto` minimizes: the length of a step, plus weighted terms for what the
 * timeline does not model (latencies, requests that delay each other, buffers). The terms are: the
 * time that SSDs are busy; again, with a larger weight, the part of this time that moves
 * activations; the time that the link moves activations; and the time it would take to move out
 * the activations that stay on the GPU, because these activations take room from parameters.
 */
double lh_plan_auto_cost_s(const struct lh_plan_step *step, const struct lh_plan_machine *machine);
/*
 * The policy `auto`: replace the choice by a better one, if the search finds one whose step takes
 * no longer than limit_s.
 *
 * Errors: -ENOMEM; the choice is unchanged then.
 */
int lh_plan_auto(struct lh_plan_choice *choice, double limit_s, struct lh_plan_ask *ask,
                 struct lh_error *err) LH_MUST_CHECK;

#endif
