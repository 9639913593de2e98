/*
 * Selection of the chunks that move next: slabs are assigned, and chunks are read and computed, in
 * the order of the queue. Private to csrc/sched.
 *
 * Chunks are read before their gradients arrive, in the order in which the last step updated its
 * units. A slab with a chunk that was read ahead is taken from it when a unit whose update is
 * queued needs a slab. Writes have the lowest priority and the slabs are few, so reads, arithmetic
 * and writes of successive chunks overlap, and a write is issued after the next chunk's read.
 *
 * A poll visits only chunks that may be able to move: each unit has a cursor that skips computed
 * chunks and a count of LOADED chunks, and once no slab is available no IDLE chunk is visited. So
 * the cost of a poll depends on the number of slabs, not on the size of the model.
 *
 * Source: LoHan IV-C fig. 3b, Fuyou 4.3.
 */
#ifndef LH_SCHED_UPDATE_PUMP_H
#define LH_SCHED_UPDATE_PUMP_H

#include "base/base.h"

struct lh_chunk;
struct lh_engine;
struct lh_unit;

/* The state of one poll. */
struct lh_update_pump {
    bool moved;
    bool may_fetch; /* no unit that has precedence waits for a slab */
    bool is_full;   /* no slab is free, and no slab holds a chunk that was only read ahead */
    bool is_urgent; /* a thread waits for a unit that needs busy workers: no later unit computes */
};

/* Move every chunk that can move. Returns whether any chunk moved. */
bool lh_update_pump(struct lh_engine *engine);
/*
 * Begin the update of a queued unit and keep readers from its bytes. Returns false if that is not
 * possible now.
 */
bool lh_update_pump_take(struct lh_engine *engine, struct lh_unit *unit);
/* The index of the unit's first chunk that this step has not computed. */
uint32_t lh_update_pump_next(struct lh_engine *engine, struct lh_unit *unit);
/* Read an IDLE chunk into a slab. Returns false if there is no slab for it now. */
bool lh_update_pump_fetch(struct lh_engine *engine, struct lh_chunk *chunk,
                          struct lh_update_pump *pump);

#endif
