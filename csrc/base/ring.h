/*
 * A bounded lock-free queue of fixed-size messages with many writers and one reader (one ticket per
 * cell, after D. Vyukov's bounded MPMC queue). It carries messages from training threads to the
 * engine, and completions from workers and I/O threads to the engine.
 *
 * Invariants:
 *  1. The number of cells is a power of two; the sequence of a cell shows who may use it (ring.c).
 *  2. A message is published by the release store of its cell's sequence and read after an acquire
 *     load of that sequence.
 *
 * Thread: any thread may call lh_ring_push(), only the reader lh_ring_pop().
 */
#ifndef LH_BASE_RING_H
#define LH_BASE_RING_H

#include <stdatomic.h>

#include "base/alloc.h"
#include "base/error.h"

#define LH_RING_MESSAGE_WORDS 4

struct lh_ring_message {
    uint64_t words[LH_RING_MESSAGE_WORDS];
};

struct lh_ring_cell {
    _Atomic uint64_t sequence;
    struct lh_ring_message message;
};

struct lh_ring {
    struct lh_ring_cell *cells;
    uint64_t mask;
    _Alignas(64) _Atomic uint64_t write_ticket;
    _Alignas(64) uint64_t read_ticket;
};

/* cell_count_min is rounded up to a power of two. Errors: -ENOMEM, -EINVAL (0 or above 2^24). */
int lh_ring_init(struct lh_ring *ring, struct lh_alloc *alloc, uint64_t cell_count_min,
                 struct lh_error *err) LH_MUST_CHECK;
void lh_ring_deinit(struct lh_ring *ring, struct lh_alloc *alloc);

/* Returns false if the ring is full. */
bool lh_ring_push(struct lh_ring *ring, struct lh_ring_message message) LH_MUST_CHECK;
/* Returns false if the ring is empty. */
bool lh_ring_pop(struct lh_ring *ring, struct lh_ring_message *message_out) LH_MUST_CHECK;

#endif
