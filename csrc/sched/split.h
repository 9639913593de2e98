/*
 * Schedule AUTO: which units are updated as their gradients arrive (eager), which overlaps
 * backward, and which units are updated after the close (deferred), which overlaps the next
 * forward.
 *
 * Backward alone can hide only as much work as it has time for. If the SSDs or the workers need
 * longer, backward waits for them, although they are idle in forward. So some of the units, spread
 * evenly over the model, are deferred, such that the busiest resource's load is proportional to the
 * length of each half:
 *
 *      parameters read in forward  + deferred share       * updates     length of forward
 *      --------------------------------------------------------------- = ------------------
 *      parameters read in backward + (1 - deferred share) * updates     length of backward
 *
 * The benefit of a split depends on more than that, so steps with a split are compared with steps
 * in which all units are eager: the split is halved once if it was slower, and is given up unless
 * it is faster. A split changes only between steps, based on previous steps, so what a step reads
 * and writes is known when it begins; and all splits produce the same numbers. Gradients of
 * deferred units wait in memory: units whose gradients have no room there are eager.
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
    uint64_t step_ns;    /* the duration of the fastest of these steps */
    uint64_t eager_ns;   /* the duration of a step with no unit deferred */
    /* Recorded at the open step's first gradient: */
    uint64_t gradient_ns;
    uint64_t forward_bytes; /* the bytes of parameters read until then */
};

extern const struct lh_feature lh_split_feature;

/* Make every unit eager. */
int lh_split_create(struct lh_engine *engine, struct lh_error *err);
/*
 * Defer deferred_count units, or as many as have room. Call only between two steps, with schedule
 * AUTO.
 */
void lh_split_set(struct lh_engine *engine, uint32_t deferred_count);

#endif
