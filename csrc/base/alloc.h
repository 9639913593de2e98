/*
 * The only way lohan's core gets memory from the heap.
 *
 * An engine allocates everything while it is created and then seals its allocator: memory budgets
 * are ceilings, and a training run must not fail for memory at step 10,000. A sealed allocator
 * refuses (NULL) and counts the attempt.
 *
 *      INIT --[lh_alloc_seal]--> SEALED --[lh_alloc_unseal, at teardown]--> INIT
 *
 * Fault injection: fail_after counts down on each allocation; the one that finds it at 0 fails (-1:
 * never). A test loops fail_after = 0, 1, 2, ... until the operation passes untouched.
 *
 * Thread: an allocator belongs to the thread that creates the engine; lh_free may run on any
 *         thread.
 */
#ifndef LH_BASE_ALLOC_H
#define LH_BASE_ALLOC_H

#include "base/base.h"

struct lh_alloc {
    bool sealed;
    int64_t fail_after;     /* -1: never; else allocations that still succeed */
    uint64_t live_count;    /* allocations not yet freed */
    uint64_t live_bytes;    /* of them, as the heap rounds them */
    uint64_t refused_count; /* allocations refused because sealed */
};

#define LH_ALLOC_INIT {.sealed = false, .fail_after = -1}

/*
 * count * bytes of zeroed memory, aligned to 64 bytes; NULL on overflow, when sealed, on injected
 * or real exhaustion.
 *
 * Owns:   the caller owns the memory; release with lh_free(alloc, pointer).
 */
void *lh_alloc_zeroed(struct lh_alloc *alloc, uint64_t count, uint64_t bytes) LH_MUST_CHECK;

/* pointer may be NULL. */
void lh_free(struct lh_alloc *alloc, void *pointer);

void lh_alloc_seal(struct lh_alloc *alloc);
void lh_alloc_unseal(struct lh_alloc *alloc);

#endif
