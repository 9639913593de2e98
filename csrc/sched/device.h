/*
 * Units on an accelerator: copies of main memory's bytes (device.c). Private to csrc/sched.
 *
 *      ABSENT -> COPYING      load_start         op LOAD: the unit is READY, or chunks are updated
 *      COPYING -> READY       copy_arrived       is_ordered: all is submitted; else it came back
 *      COPYING -> READY       unit_forgotten     the step was rolled back before all was copied
 *      READY -> ABSENT        left               op EVICT: no pins, or the copy is stale
 *      READY -> LEAVING       out_start          op EVICT, and it was changed there
 *      LEAVING -> ABSENT      left               main memory has its bytes
 */
#ifndef LH_SCHED_DEVICE_H
#define LH_SCHED_DEVICE_H

#include <stdatomic.h>

#include "base/error.h"
#include "sched/feature.h"
#include "sched/states.h"

struct lh_engine;
struct lh_unit;
struct lh_chunk;
struct lh_slab;
struct lh_dev_fence;

/* A unit's copy on the accelerator, with the counts of [Note: Moved units] in engine.h. */
struct lh_device_unit {
    enum lh_copy_state state;
    bool is_stale;                   /* the unit's update is queued or over */
    bool is_copying;                 /* a copy in, or a copy back, of its bytes is in flight */
    uint32_t part_count;             /* copies of parts of it in flight */
    _Atomic bool is_modified;        /* it was changed there: main memory has older bytes */
    bool host_matches_write_back;    /* main memory's bytes are those of the last copy back */
    _Atomic bool is_from_write_back; /* they were when this copy was made */
    _Atomic uint32_t copy_count;
    _Atomic uint32_t out_count;
    uint64_t offset;
    uint64_t use_count;
    struct lh_dev_fence *arrived;
    struct lh_dev_fence *released;
};

struct lh_device {
    uint32_t loads_in_flight;
    uint32_t leaving_count; /* units that are LEAVING */
    _Atomic uint32_t policy;
    _Atomic uint64_t alloc_bytes_per_s;
    uint32_t loading_unit;  /* the unit that is copied while it is updated; LH_UNIT_NONE */
    uint64_t loading_bytes; /* how much of its copy has begun */
};

/* Whether the unit's newest bytes are on the accelerator. */
static inline bool lh_device_unit_is_here(const struct lh_device_unit *copy)
{
    return copy->state == LH_COPY_STATE_READY && !copy->is_stale;
}

/* Whether the plan counts its place as taken: it is there, or being copied there. */
static inline bool lh_device_unit_is_placed(const struct lh_device_unit *copy)
{
    return copy->state == LH_COPY_STATE_COPYING || copy->state == LH_COPY_STATE_READY;
}

/* Create the copies, and the fences of units and gradients. */
int lh_device_create(struct lh_engine *engine, struct lh_error *err);
void lh_device_destroy(struct lh_engine *engine);
extern const struct lh_feature lh_device_feature;

#endif
