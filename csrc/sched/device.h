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

struct lh_engine;
struct lh_unit;
struct lh_chunk;
struct lh_copy;
struct lh_slab;

struct lh_device {
    uint32_t loads_in_flight;
    uint32_t leaving_count; /* units that are LEAVING */
    _Atomic uint32_t policy;
    _Atomic uint64_t alloc_bytes_per_s;
    uint32_t loading_unit;  /* the unit that is copied while it is updated, or LH_UNIT_NONE */
    uint64_t loading_bytes; /* the bytes of loading_unit whose copies have begun */
};

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
