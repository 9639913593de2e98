/*
 * The allocator through which lohan's core allocates all of its heap memory.
 *
 * An engine allocates everything while it is created and then seals its allocator: memory budgets
 * are upper limits, and a training run must not run out of memory at step 10,000. A sealed
 * allocator returns NULL and counts the attempt.
 *
 *      INIT --[lh_alloc_seal]--> SEALED --[lh_alloc_unseal, at teardown]--> INIT
 *
 * Fault injection: each allocation decrements fail_after; allocations fail once it is 0 (-1:
 * never). A test repeats an operation with fail_after = 0, 1, 2, ... until it succeeds.
 *
 * Thread: an allocator belongs to the thread that creates the engine; lh_free may run on any
 *         thread.
 */
#ifndef LH_BASE_ALLOC_H
#define LH_BASE_ALLOC_H

#include "base/base.h"

struct lh_alloc {
    bool sealed;
    int64_t fail_after;     /* the number of allocations that still succeed; -1: all */
    uint64_t live_count;    /* allocations that are not freed yet */
    uint64_t live_bytes;    /* the size of these allocations, as rounded by the heap */
    uint64_t refused_count; /* allocations attempted while sealed */
};

#define LH_ALLOC_INIT {.sealed = false, .fail_after = -1}

/*
 * Allocate count * bytes of zeroed memory, aligned to 64 bytes. Returns NULL on overflow, when
 * sealed, and on injected or real exhaustion.
 *
 * Owns:   the caller owns the memory; release with lh_free(alloc, pointer).
 */
void *lh_alloc_zeroed(struct lh_alloc *alloc, uint64_t count, uint64_t bytes) LH_MUST_CHECK;

/* Free memory that alloc allocated. pointer may be NULL. */
void lh_free(struct lh_alloc *alloc, void *pointer);

void lh_alloc_seal(struct lh_alloc *alloc);
void lh_alloc_unseal(struct lh_alloc *alloc);

#endif
