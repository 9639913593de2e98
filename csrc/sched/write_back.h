/*
 * What updates write, and when. Private to csrc/sched.
 *
 * [Note: Between commits] If commits happen only every few steps, data that stays in memory need
 * not be written in the steps between: R, M and V of a chunk that keeps its slab, and P of a unit
 * that has a place of its own in the region. Its slot on SSD then belongs to an older step and is
 * not read: the chunk, or the unit's P, is dirty. A step that commits writes all that it updates
 * and, before the commit, whatever is still dirty from earlier steps. A flush writes it, too,
 * because its caller may read the store.
 *
 * Source: LoHan IV-C (delayed write-back); that memory is a tier for states is ours.
 */
#ifndef LH_SCHED_WRITE_BACK_H
#define LH_SCHED_WRITE_BACK_H

#include "base/base.h"

struct lh_chunk;
struct lh_engine;

/* The bytes of R, M and V, and of P, that an update of chunk in step writes. */
uint64_t lh_write_back_state_bytes(const struct lh_engine *engine, const struct lh_chunk *chunk,
                                   uint64_t step);
uint64_t lh_write_back_param_bytes(const struct lh_engine *engine, const struct lh_chunk *chunk,
                                   uint64_t step);
/* Write all that its step has to write of a computed chunk. */
void lh_write_back_chunk(struct lh_engine *engine, struct lh_chunk *chunk);
/*
 * Write everything dirty, counted for step (0: for no step). True: a write was started. No chunk
 * may be in progress otherwise.
 */
bool lh_write_back_dirty(struct lh_engine *engine, uint64_t step);

#endif
