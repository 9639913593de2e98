/*
 * Schedule auto: which units are updated as their gradients arrive (eager), hidden behind backward,
 * and which ahead of the next forward (deferred), hidden behind that.
 *
 * Backward alone hides what it has time for. Where the SSDs or the workers need longer than that,
 * it waits, while they are idle in forward. So a part of the units is deferred, spread evenly over
 * the model, such that the busiest resource has as much to do in either half for its length:
 *
 *      parameters read in forward  + deferred share       * updates     length of forward
 *      --------------------------------------------------------------- = ------------------
 *      parameters read in backward + (1 - deferred share) * updates     length of backward
 *
 * What a split is worth depends on more than that, so it is tried beside all-eager steps: it is
 * halved once if it was slower, and dropped unless it is faster. A split is changed between steps
 * only, by the steps before, so what a step reads and writes is known when it begins; and the
 * numbers are the same in any. Gradients of deferred units wait in memory: what has no room there
 * is eager.
 *
 * Thread: the engine's.
 * Source: LoHan IV-C hides updates behind backward; the balance with forward is ours.
 */
#ifndef LH_SCHED_SPLIT_H
#define LH_SCHED_SPLIT_H

#include "sched/feature.h"

struct lh_split {
    uint32_t deferred_count; /* units */
    uint32_t trial_count;    /* splits that were no gain */
    bool is_settled;
    uint32_t step_count; /* since it was changed */
    uint64_t step_ns;    /* of the fastest of them */
    uint64_t eager_ns;   /* with no unit deferred */
    /* Of the open step, when its first gradient came: */
    uint64_t gradient_ns;
    uint64_t forward_bytes; /* parameters read so far */
};

extern const struct lh_feature lh_split_feature;

/* Every unit is eager. */
void lh_split_create(struct lh_engine *engine);
/* Between two steps, with schedule AUTO: defer so many units, or as many as have room. */
void lh_split_set(struct lh_engine *engine, uint32_t deferred_count);

#endif
