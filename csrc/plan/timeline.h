/*
 * The length of a step for a given choice, simulated on one timeline: lohan's own schedule, block
 * by block.
 *
 *      GPU    |f0|f1|f2|...|b2|b1|b0|f0|
 *      in     P16 before f and b, and activations that are fetched
 *      out    activations after f, gradients after b
 *      SSD    traffic of both directions, in the order in which the blocks need it
 *      CPU    AdamW, after the arrival of the gradient and the states
 *
 * Every resource serves its blocks in order, one after the other. The dependencies are:
 *
 *      a forward or a backward follows its block's P16 and its fetched activations;
 *      an eager update follows its block's gradient, and its SSD traffic is part of backward;
 *      a deferred update follows the last gradient, and its SSD traffic is part of the next
 *      forward, just before the traffic of its block;
 *      no forward begins before its block's update is computed (no staleness);
 *      activations that leave the GPU, or are fetched ahead, have room in half of its free memory;
 *      nothing is fetched for backward before forward is two blocks from its end.
 *
 * Several steps are run from a standstill, and the mean length of the last ones is the result: at
 * least the total work of the busiest resource, which is what bounds the step, and at most the sum
 * of all resources. Two stages that do not overlap at all give LoHan eq. 1.
 *
 * Frozen parameters are read and copied like P16, and no update follows; with P16 in main memory,
 * they are there too, and no commit writes them.
 *
 * States in main memory cause no traffic, except that commits write them: once in several steps,
 * so rarely that commits take at most one percent of the time.
 *
 * Pure; includes base only. Thread: a timeline belongs to its caller.
 * Source: LoHan IV-C, IV-D (the work of each resource), Fuyou 4.3.
 */
#ifndef LH_PLAN_TIMELINE_H
#define LH_PLAN_TIMELINE_H

#include "plan/choice.h"
#include "plan/machine.h"

enum lh_plan_resource {
    LH_PLAN_RESOURCE_GPU = 0,
    LH_PLAN_RESOURCE_IN,
    LH_PLAN_RESOURCE_OUT,
    LH_PLAN_RESOURCE_SSD,
    LH_PLAN_RESOURCE_CPU,
};
#define LH_PLAN_RESOURCE_COUNT 5

/* A step in the steady state. Bytes and FLOP are exact. */
struct lh_plan_step {
    double iteration_s;
    double busy_s[LH_PLAN_RESOURCE_COUNT];
    enum lh_plan_resource bound_by; /* the busiest resource */
    uint64_t recompute_flop;
    uint64_t kept_bytes;        /* activations that stay on the GPU */
    uint64_t swapped_bytes;     /* activations that leave the GPU */
    uint64_t swapped_ssd_bytes; /* the part of swapped_bytes that goes to SSD */
    uint64_t link_in_bytes;
    uint64_t link_out_bytes;
    uint64_t ssd_read_bytes;
    uint64_t ssd_write_bytes; /* the writes of a step, without those of a commit */
    uint64_t commit_bytes;    /* states in main memory, written by each commit */
    uint64_t commit_every;    /* in steps; 1 if a commit has nothing to write */
    uint64_t transit_bytes;   /* the GPU's room for activations of one block in transit */
    /* The minimum capacity of each tier: for buffers, and for what stays in the tier. */
    uint64_t gpu_bytes;
    uint64_t host_bytes;
    uint64_t ssd_bytes; /* two slots of each state, and activations */
};

struct lh_plan_timeline {
    const struct lh_plan_model *model;     /* borrowed until deinit */
    const struct lh_plan_machine *machine; /* borrowed until deinit */
    struct lh_plan_timeline_block *blocks; /* owned: scratch space */
    struct lh_plan_totals totals;
};

/* Main memory that the buffers of a step need, in addition to activations and states held there. */
uint64_t lh_plan_host_working_bytes(const struct lh_plan_model *model);
/*
 * GPU memory that the buffers of a step need: P16 of two blocks, gradients of one block, and what
 * the computation of the largest block takes.
 */
uint64_t lh_plan_gpu_working_bytes(const struct lh_plan_model *model);

/*
 * Initialize a timeline for choices of a model on a machine, both of which passed their checks.
 *
 * Owns:   scratch; release with lh_plan_timeline_deinit() and the same alloc.
 * Errors: -ENOMEM; nothing is owned then.
 */
int lh_plan_timeline_init(struct lh_plan_timeline *timeline, const struct lh_plan_model *model,
                          const struct lh_plan_machine *machine, struct lh_alloc *alloc,
                          struct lh_error *err) LH_MUST_CHECK;
void lh_plan_timeline_deinit(struct lh_plan_timeline *timeline, struct lh_alloc *alloc);

/* Estimate a step with this choice, whether the step fits the machine or not. */
struct lh_plan_step lh_plan_timeline_step(struct lh_plan_timeline *timeline,
                                          const struct lh_plan_choice *choice);
/* Returns 0, or -ENOSPC: a tier has less than the step needs; the message has both numbers. */
int lh_plan_step_check(const struct lh_plan_step *step, const struct lh_plan_machine *machine,
                       struct lh_error *err) LH_MUST_CHECK;

#endif
