/*
 * Units on an accelerator: copies of the bytes in main memory (device.c). Private to csrc/sched.
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
struct lh_copy;
struct lh_slab;
struct lh_dev_fence;

/* A unit's copy on the accelerator, with the counts of [Note: Moved units] in engine.h. */
struct lh_device_unit {
    enum lh_copy_state state;
    /* the unit's update is queued or finished: the copy is outdated */
    bool is_stale;
    bool is_copying;              /* the unit is being copied in or back */
    uint32_t part_count;          /* number of the unit's parts whose copies are in flight */
    _Atomic bool is_modified;     /* the copy was changed: main memory has older bytes */
    bool host_matches_write_back; /* main memory has the bytes of the last copy back */
    /* the value of host_matches_write_back when this copy was made */
    _Atomic bool is_from_write_back;
    _Atomic uint32_t copy_count;
    _Atomic uint32_t out_count;
    uint64_t offset;
    uint64_t use_count;
    struct lh_dev_fence *arrived;
    struct lh_dev_fence *released;
    bool is_release_awaited; /* unified.c: a marker after `released` is in flight */
};

struct lh_device {
    uint32_t loads_in_flight;
    uint32_t leaving_count; /* units that are LEAVING */
    _Atomic uint32_t policy;
    _Atomic uint64_t alloc_bytes_per_s;
    uint32_t loading_unit;  /* the unit that is copied while it is updated, or LH_UNIT_NONE */
    uint64_t loading_bytes; /* the bytes of loading_unit whose copies have begun */
};

/* Whether the unit's newest bytes are on the accelerator. */
static inline bool lh_device_unit_is_here(const struct lh_device_unit *copy)
{
    return copy->state == LH_COPY_STATE_READY && !copy->is_stale;
}

/* Whether the plan counts the copy's place as taken: the copy is complete or in progress. */
static inline bool lh_device_unit_is_placed(const struct lh_device_unit *copy)
{
    return copy->state == LH_COPY_STATE_COPYING || copy->state == LH_COPY_STATE_READY;
}

/* Create the table of copies, and the fences of units and gradients. */
int lh_device_create(struct lh_engine *engine, struct lh_error *err);
void lh_device_destroy(struct lh_engine *engine);
/*
 * For features that bring a unit onto the accelerator in parts: start the copy of a part, whose
 * done() must call lh_device_part_end(); and the unit is complete. A copy must be free. The part
 * that is at the end of the unit records its fence. Returns false if the engine has failed.
 */
bool lh_device_part_copy(struct lh_engine *engine, struct lh_unit *unit, uint64_t first,
                         uint64_t end,
                         void (*done)(struct lh_engine *engine, struct lh_copy *copy));
void lh_device_part_end(struct lh_engine *engine, struct lh_unit *unit);
void lh_device_arrived(struct lh_engine *engine, struct lh_unit *unit);
extern const struct lh_feature lh_device_feature;

#endif
