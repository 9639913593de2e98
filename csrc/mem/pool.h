/*
 * A pool of slabs of equal size in an arena, for buffers of one size.
 *
 *      FREE --[lh_pool_acquire]--> HELD --[lh_pool_release]--> FREE
 *
 * Under AddressSanitizer a FREE slab is poisoned.
 * Thread: one owner.
 */
#ifndef LH_MEM_POOL_H
#define LH_MEM_POOL_H

#include "base/alloc.h"
#include "base/error.h"

struct lh_pool {
    uint8_t *base; /* borrowed from the arena until deinit */
    uint64_t slab_bytes;
    uint32_t slab_count;
    uint32_t free_count;
    uint32_t *free_indices; /* a stack of the indices of free slabs */
    uint8_t *held;          /* one flag per slab */
};

/*
 * base and slab_bytes must be multiples of LH_BLOCK_BYTES. Errors: -EINVAL, -ENOMEM.
 */
int lh_pool_init(struct lh_pool *pool, struct lh_alloc *alloc, void *base, uint64_t slab_bytes,
                 uint32_t slab_count, struct lh_error *err) LH_MUST_CHECK;
void lh_pool_deinit(struct lh_pool *pool, struct lh_alloc *alloc);

/* Returns NULL if no slab is free. */
void *lh_pool_acquire(struct lh_pool *pool);
void lh_pool_release(struct lh_pool *pool, void *slab);

#endif
