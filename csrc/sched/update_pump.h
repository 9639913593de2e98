/*
 * Which chunk moves next: assign slabs, fetch and compute chunks, in the order of the queue.
 * Private to csrc/sched.
 *
 * Reads go ahead of gradients, in the order in which the last step updated its units; a slab that
 * holds a chunk read ahead is taken back when a unit that has its gradients needs one. Writes have
 * the lowest priority and the slabs are few, so reads, arithmetic and writes of successive chunks
 * overlap, and a write is issued after the next chunk's read.
 *
 * A poll visits only what can move. A unit's cursor skips computed chunks; after it, LOADED chunks
 * are counted, and once no slab is available nothing else is visited. So the cost of a poll depends
 * on the number of slabs, not on the size of the model.
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
    bool may_fetch; /* no unit with precedence waits for a slab */
    bool is_full;   /* no slab is free, and none holds what was only read ahead */
    bool is_urgent; /* a thread waits for a unit that waits for workers: no later one computes */
};

/* Move every chunk that can move. Returns whether any did. */
bool lh_update_pump(struct lh_engine *engine);
/*
 * Begin the update of a queued unit, taking it away from its readers. Returns false if that is not
 * possible now.
 */
bool lh_update_pump_take(struct lh_engine *engine, struct lh_unit *unit);
/* The index of the unit's first chunk that this step has not computed. */
uint32_t lh_update_pump_next(struct lh_engine *engine, struct lh_unit *unit);
/* Read a chunk that is IDLE, if it gets a slab. */
bool lh_update_pump_fetch(struct lh_engine *engine, struct lh_chunk *chunk,
                          struct lh_update_pump *pump);

#endif
