/*
 * What updates write, and when. Private to csrc/sched.
 *
 * [Note: Between commits] Where a commit comes every few steps, what memory keeps need not be
 * written in those between: R, M and V of a chunk that keeps its slab, and P of a unit that has a
 * place of its own in the region. Its slot on SSD is of an older step then, and nobody reads it:
 * the chunk, or the unit's P, is dirty. A step that commits writes all that it updates, and before
 * the commit what is still dirty from earlier steps; a flush writes it, too, because whoever asks
 * for one may look into the store.
 *
 * Source: LoHan IV-C (delayed write-back); that memory is a tier for states is ours.
 */
#ifndef LH_SCHED_WRITE_BACK_H
#define LH_SCHED_WRITE_BACK_H

#include "base/base.h"

struct lh_chunk;
struct lh_engine;

/* What an update of chunk in step writes, of R, M and V, and of P. */
uint64_t lh_write_back_state_bytes(const struct lh_engine *engine, const struct lh_chunk *chunk,
                                   uint64_t step);
uint64_t lh_write_back_param_bytes(const struct lh_engine *engine, const struct lh_chunk *chunk,
                                   uint64_t step);
/* A chunk is computed: write all that its step has to write of it. */
void lh_write_back_chunk(struct lh_engine *engine, struct lh_chunk *chunk);
/*
 * Write what only memory has, as step's (0: nobody's): true, if there is something that was not
 * under way yet. Nothing else of a chunk is.
 */
bool lh_write_back_dirty(struct lh_engine *engine, uint64_t step);

#endif
