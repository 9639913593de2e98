/*
 * Schedule auto: which units are updated as their gradients arrive (eager), overlapping backward,
 * and which before the next forward (deferred), overlapping that.
 *
 * Backward alone can hide only as much work as it has time for. If the SSDs or the workers need
 * longer, backward waits for them, and they are idle in forward. So some of the units, spread
 * evenly over the model, are deferred, such that the busiest resource's load is proportional to the
 * length of each half:
 *
 *      parameters read in forward  + deferred share       * updates     length of forward
 *      --------------------------------------------------------------- = ------------------
 *      parameters read in backward + (1 - deferred share) * updates     length of backward
 *
 * The benefit of a split depends on more than that, so it is compared with all-eager steps: it is
 * halved once if it was slower, and dropped unless it is faster. A split changes only between
 * steps, based on previous steps, so what a step reads and writes is known when it begins; and all
 * splits produce the same numbers. Gradients of deferred units wait in memory: units whose
 * gradients have no room there are eager.
 *
 * Thread: the engine's.
 * Source: LoHan IV-C overlaps updates with backward; the balance with forward is ours.
 */
#ifndef LH_SCHED_SPLIT_H
#define LH_SCHED_SPLIT_H

#include "sched/feature.h"

struct lh_split {
    uint32_t deferred_count; /* the number of deferred units */
    uint32_t trial_count;    /* the number of splits that brought no gain */
    bool is_settled;
    uint32_t step_count; /* the number of steps since the split was changed */
    uint64_t step_ns;    /* the time of the fastest of these steps */
    uint64_t eager_ns;   /* the time of a step with no unit deferred */
    /* At the open step's first gradient: */
    uint64_t gradient_ns;
    uint64_t forward_bytes; /* the bytes of parameters read so far */
};

extern const struct lh_feature lh_split_feature;

/* Make every unit eager. */
void lh_split_create(struct lh_engine *engine);
/* Defer deferred_count units, or as many as have room. Between two steps, with schedule AUTO. */
void lh_split_set(struct lh_engine *engine, uint32_t deferred_count);

#endif
