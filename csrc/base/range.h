/*
 * An allocator of offsets in one region: first fit, with adjacent holes merged. It is pure
 * bookkeeping without memory: the residency plan uses it ahead of time, and the engine takes the
 * plan's addresses.
 *
 * Invariants: 1. holes are sorted by offset, none empty, no two adjacent.  2. offsets and sizes are
 * multiples of granule.
 * Thread: one owner.
 */
#ifndef LH_BASE_RANGE_H
#define LH_BASE_RANGE_H

#include "base/alloc.h"
#include "base/error.h"

#define LH_RANGE_NONE UINT64_MAX

struct lh_range_hole {
    uint64_t offset;
    uint64_t bytes;
};

struct lh_range {
    struct lh_range_hole *holes; /* capacity hole_max */
    uint32_t hole_count;
    uint32_t hole_max;
    uint64_t total_bytes;
    uint64_t free_bytes;
    uint64_t granule;
};

/* hole_max must exceed the number of ranges ever held at once. Errors: -ENOMEM, -EINVAL. */
int lh_range_init(struct lh_range *range, struct lh_alloc *alloc, uint64_t total_bytes,
                  uint64_t granule, uint32_t hole_max, struct lh_error *err) LH_MUST_CHECK;
void lh_range_deinit(struct lh_range *range, struct lh_alloc *alloc);
void lh_range_reset(struct lh_range *range);
/* Copy a state. Both ranges are initialized; target's hole_max must be at least source's. */
void lh_range_copy(struct lh_range *target, const struct lh_range *source);

/* Acquire bytes (rounded up to granule) from the first hole that fits: offset or LH_RANGE_NONE. */
uint64_t lh_range_acquire(struct lh_range *range, uint64_t bytes);
/* Acquire [offset, offset + bytes), which must be free, to rebuild a region from its contents. */
void lh_range_take(struct lh_range *range, uint64_t offset, uint64_t bytes);
/* Whether lh_range_acquire would succeed. */
bool lh_range_has(const struct lh_range *range, uint64_t bytes);
void lh_range_release(struct lh_range *range, uint64_t offset, uint64_t bytes);

#endif
