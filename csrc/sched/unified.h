/*
 * Units that an accelerator reads in main memory, because it has no other memory: no copy is made,
 * and main memory's plan is that of the CPU. Private to csrc/sched.
 *
 * The accelerator reads a unit later than the host unpins it. Nothing may change a unit's bytes, or
 * reuse their place, before the accelerator has executed the unit's last reader:
 *
 *      last unpin          records `released` on the stream (the fence of struct lh_unit_copy)
 *      update or eviction  claims the unit; if `released` has not passed, it gives the unit back,
 *                          and a marker (dev.h) wakes the engine when it has
 *
 * In the other direction, nothing has to wait: a unit is READY when all of its bytes are in main
 * memory, and a reader is enqueued only after that.
 */
#ifndef LH_SCHED_UNIFIED_H
#define LH_SCHED_UNIFIED_H

#include <stdbool.h>

#include "sched/feature.h"

struct lh_unified {
    bool is_any_new; /* a marker was submitted: poll the device before the engine sleeps */
};

extern const struct lh_feature lh_unified_feature;

#endif
