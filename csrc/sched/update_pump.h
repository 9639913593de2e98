/*
 * Which chunk moves next: slabs given out, chunks fetched and computed, in the order of the queue.
 * Private to csrc/sched.
 *
 * Reads go ahead of gradients, in the order in which the last step updated its units; a slab that
 * holds a chunk read ahead is taken back when a unit that has its gradients needs one. Writes have
 * the lowest priority and the slabs are few, so reads, arithmetic and writes of successive chunks
 * overlap, and a write is issued after the next chunk's read.
 *
 * A poll looks at what can move. A unit's cursor passes what is computed; after it, chunks that
 * are LOADED are counted, and once no slab is to be had nothing else is looked at. So a poll costs
 * what is in slabs, not what the model has.
 *
 * Source: LoHan IV-C fig. 3b, Fuyou 4.3.
 */
#ifndef LH_SCHED_UPDATE_PUMP_H
#define LH_SCHED_UPDATE_PUMP_H

#include "base/base.h"

struct lh_chunk;
struct lh_engine;
struct lh_unit;

/* What one poll has found out so far. */
struct lh_update_pump {
    bool moved;
    bool may_fetch; /* nobody with a better right waits for a slab */
    bool is_full;   /* no slab is free, and none holds what was only read ahead */
    bool is_urgent; /* somebody waits for a unit that waits for workers: no later one computes */
};

/* Move what can move. True: something did. */
bool lh_update_pump(struct lh_engine *engine);
/* Take a unit whose update is queued from its readers: its update begins. False: not now. */
bool lh_update_pump_take(struct lh_engine *engine, struct lh_unit *unit);
/* The first chunk of the unit that this step has not computed: it and those after it are left. */
uint32_t lh_update_pump_next(struct lh_engine *engine, struct lh_unit *unit);
/* Read a chunk that is IDLE, if it gets a slab. */
bool lh_update_pump_fetch(struct lh_engine *engine, struct lh_chunk *chunk,
                          struct lh_update_pump *pump);

#endif
