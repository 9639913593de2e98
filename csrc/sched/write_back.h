/*
 * The writes of updates, and when they are due. Private to csrc/sched.
 *
 * [Note: Between commits] If commits happen only every few steps, data that stays in memory need
 * not be written in the steps between two commits: R, M and V of a chunk that keeps its slab, and P
 * of a unit that has a place of its own in the region. The bytes on SSD then belong to an older
 * step and are not read: the chunk, or the unit's P, is dirty. A step that commits writes
 * everything that it updates and, before the commit, whatever is still dirty from earlier steps. A
 * flush also writes dirty data, because its caller may read the store.
 *
 * Source: LoHan IV-C (delayed write-back); the use of memory as a tier for states is our addition.
 */
#ifndef LH_SCHED_WRITE_BACK_H
#define LH_SCHED_WRITE_BACK_H

#include "base/base.h"

struct lh_chunk;
struct lh_engine;

/* The number of bytes of R, M and V, and of P, that an update of chunk writes in step. */
uint64_t lh_write_back_state_bytes(const struct lh_engine *engine, const struct lh_chunk *chunk,
                                   uint64_t step);
uint64_t lh_write_back_param_bytes(const struct lh_engine *engine, const struct lh_chunk *chunk,
                                   uint64_t step);
/* Write the bytes of a computed chunk that are due in its step. Other bytes become dirty. */
void lh_write_back_chunk(struct lh_engine *engine, struct lh_chunk *chunk);
/*
 * Write all dirty data; the bytes count for step (0: for no step). Returns whether a write was
 * started. No chunk may be in progress.
 */
bool lh_write_back_dirty(struct lh_engine *engine, uint64_t step);

#endif
