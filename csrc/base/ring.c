/*
 * The sequence of a cell shows who may use the cell, for the ticket t that maps to it (t & mask is
 * the index of the cell):
 *
 *      sequence == t               empty: the writer that draws ticket t may fill it
 *      sequence == t + 1           full: the reader at ticket t may take it
 *      sequence == t + mask + 1    taken: empty again, for the writer one lap later
 *
 * With one cell, "full for t" and "empty for t + 1" would be the same number, so a ring has at
 * least two cells.
 */
#include "base/ring.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"

#define RING_CELL_COUNT_MIN 2
#define RING_CELL_COUNT_MAX (UINT64_C(1) << 24)

int lh_ring_init(struct lh_ring *ring, struct lh_alloc *alloc, uint64_t cell_count_min,
                 struct lh_error *err)
{
    memset(ring, 0, sizeof(*ring));
    if (cell_count_min == 0 || cell_count_min > RING_CELL_COUNT_MAX)
        return lh_error_set(err, -EINVAL, "a ring of %" PRIu64 " cells is not within 1 .. %" PRIu64,
                            cell_count_min, RING_CELL_COUNT_MAX);
    uint64_t cell_count = RING_CELL_COUNT_MIN;
    while (cell_count < cell_count_min)
        cell_count *= 2;
    ring->cells = lh_alloc_zeroed(alloc, cell_count, sizeof(*ring->cells));
    if (!ring->cells)
        return lh_error_set(err, -ENOMEM, "no memory for a ring of %" PRIu64 " cells", cell_count);
    ring->mask = cell_count - 1;
    for (uint64_t i = 0; i < cell_count; i++)
        atomic_init(&ring->cells[i].sequence, i);
    atomic_init(&ring->write_ticket, 0);
    return 0;
}

void lh_ring_deinit(struct lh_ring *ring, struct lh_alloc *alloc)
{
    lh_free(alloc, ring->cells);
    memset(ring, 0, sizeof(*ring));
}

bool lh_ring_push(struct lh_ring *ring, struct lh_ring_message message)
{
    uint64_t ticket = atomic_load_explicit(&ring->write_ticket, memory_order_relaxed);
    struct lh_ring_cell *cell = NULL;
    for (;;) {
        cell = &ring->cells[ticket & ring->mask];
        uint64_t sequence = atomic_load_explicit(&cell->sequence, memory_order_acquire);
        int64_t ahead = (int64_t)(sequence - ticket);
        if (ahead < 0)
            return false; /* the reader has not taken what was written a lap ago */
        if (ahead > 0)    /* another writer has drawn this ticket */
            ticket = atomic_load_explicit(&ring->write_ticket, memory_order_relaxed);
        else if (atomic_compare_exchange_weak_explicit(&ring->write_ticket, &ticket, ticket + 1,
                                                       memory_order_relaxed, memory_order_relaxed))
            break;
    }
    cell->message = message;
    atomic_store_explicit(&cell->sequence, ticket + 1, memory_order_release);
    return true;
}

bool lh_ring_pop(struct lh_ring *ring, struct lh_ring_message *message_out)
{
    uint64_t ticket = ring->read_ticket;
    struct lh_ring_cell *cell = &ring->cells[ticket & ring->mask];
    uint64_t sequence = atomic_load_explicit(&cell->sequence, memory_order_acquire);
    if (sequence != ticket + 1) {
        LH_ASSERT(sequence == ticket);
        return false;
    }
    *message_out = cell->message;
    atomic_store_explicit(&cell->sequence, ticket + ring->mask + 1, memory_order_release);
    ring->read_ticket = ticket + 1;
    return true;
}
