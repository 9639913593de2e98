#include "mem/pool.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define POISON(base, bytes) __asan_poison_memory_region(base, bytes)
#define UNPOISON(base, bytes) __asan_unpoison_memory_region(base, bytes)
#else
#define POISON(base, bytes) ((void)(base), (void)(bytes))
#define UNPOISON(base, bytes) ((void)(base), (void)(bytes))
#endif

int lh_pool_init(struct lh_pool *pool, struct lh_alloc *alloc, void *base, uint64_t slab_bytes,
                 uint32_t slab_count, struct lh_error *err)
{
    memset(pool, 0, sizeof(*pool));
    if (slab_bytes == 0 || !lh_is_aligned(slab_bytes, LH_BLOCK_BYTES))
        return lh_error_set(err, -EINVAL, "slab_bytes %" PRIu64 " is not a multiple of %" PRIu64,
                            slab_bytes, LH_BLOCK_BYTES);
    if (!base || !lh_is_aligned((uintptr_t)base, LH_BLOCK_BYTES))
        return lh_error_set(err, -EINVAL, "slabs at %p are not aligned to %" PRIu64, base,
                            LH_BLOCK_BYTES);
    uint64_t total_bytes = 0;
    if (slab_count == 0 || __builtin_mul_overflow(slab_bytes, slab_count, &total_bytes))
        return lh_error_set(err, -EINVAL,
                            "a pool cannot have %" PRIu32 " slabs of %" PRIu64 " bytes", slab_count,
                            slab_bytes);
    pool->free_indices = lh_alloc_zeroed(alloc, slab_count, sizeof(*pool->free_indices));
    pool->held = lh_alloc_zeroed(alloc, slab_count, sizeof(*pool->held));
    if (!pool->free_indices || !pool->held) {
        lh_free(alloc, pool->held);
        lh_free(alloc, pool->free_indices);
        memset(pool, 0, sizeof(*pool));
        return lh_error_set(err, -ENOMEM, "no memory for the records of %" PRIu32 " slabs",
                            slab_count);
    }
    pool->base = base;
    pool->slab_bytes = slab_bytes;
    pool->slab_count = slab_count;
    pool->free_count = slab_count;
    /* The lowest slab is on top of the stack, so that a pool that is never full stays compact. */
    for (uint32_t i = 0; i < slab_count; i++)
        pool->free_indices[i] = slab_count - 1 - i;
    POISON(base, total_bytes);
    return 0;
}

void lh_pool_deinit(struct lh_pool *pool, struct lh_alloc *alloc)
{
    if (!pool->base)
        return;
    /* The user of a slab that is still held would access memory that the arena reuses. */
    LH_ASSERT(pool->free_count == pool->slab_count);
    UNPOISON(pool->base, pool->slab_bytes * pool->slab_count);
    lh_free(alloc, pool->held);
    lh_free(alloc, pool->free_indices);
    memset(pool, 0, sizeof(*pool));
}

void *lh_pool_acquire(struct lh_pool *pool)
{
    LH_ASSERT(pool->free_count <= pool->slab_count);
    if (pool->free_count == 0)
        return NULL;
    uint32_t index = pool->free_indices[--pool->free_count];
    LH_ASSERT(index < pool->slab_count && !pool->held[index]);
    pool->held[index] = 1;
    uint8_t *slab = pool->base + index * pool->slab_bytes;
    UNPOISON(slab, pool->slab_bytes);
    return slab;
}

void lh_pool_release(struct lh_pool *pool, void *slab)
{
    LH_ASSERT((uint8_t *)slab >= pool->base);
    uint64_t offset = (uint64_t)((uint8_t *)slab - pool->base);
    uint64_t index = offset / pool->slab_bytes;
    LH_ASSERT(lh_is_aligned(offset, pool->slab_bytes));
    LH_ASSERT(index < pool->slab_count);
    LH_ASSERT(pool->held[index]); /* a slab must not be released twice */
    LH_ASSERT(pool->free_count < pool->slab_count);
    pool->held[index] = 0;
    pool->free_indices[pool->free_count++] = (uint32_t)index;
    POISON(slab, pool->slab_bytes);
}
