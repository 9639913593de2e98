#include "base/alloc.h"

#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

#define ALLOC_ALIGNMENT_BYTES 64
/* No machine can map more bytes. Up to this size, adding an alignment cannot overflow. */
#define ALLOC_BYTES_MAX (UINT64_C(1) << 46)

void *lh_alloc_zeroed(struct lh_alloc *alloc, uint64_t count, uint64_t bytes)
{
    if (alloc->sealed) {
        alloc->refused_count++;
        return NULL;
    }
    /* fail_after stays at 0: exhausted memory does not become available by retrying. */
    if (alloc->fail_after == 0)
        return NULL;
    if (alloc->fail_after > 0)
        alloc->fail_after--;
    uint64_t total_bytes = 0;
    if (__builtin_mul_overflow(count, bytes, &total_bytes) || total_bytes > ALLOC_BYTES_MAX)
        return NULL;
    /* Allocate the exact size, so that AddressSanitizer detects an overrun by one byte. */
    void *pointer = NULL;
    size_t size = (size_t)lh_max_u64(total_bytes, 1);
    if (posix_memalign(&pointer, ALLOC_ALIGNMENT_BYTES, size) != 0)
        return NULL;
    memset(pointer, 0, size);
    __atomic_fetch_add(&alloc->live_count, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&alloc->live_bytes, malloc_usable_size(pointer), __ATOMIC_RELAXED);
    return pointer;
}

void lh_free(struct lh_alloc *alloc, void *pointer)
{
    if (!pointer)
        return;
    uint64_t live_before = __atomic_fetch_sub(&alloc->live_count, 1, __ATOMIC_RELAXED);
    LH_ASSERT(live_before > 0);
    __atomic_fetch_sub(&alloc->live_bytes, malloc_usable_size(pointer), __ATOMIC_RELAXED);
    free(pointer);
}

void lh_alloc_seal(struct lh_alloc *alloc)
{
    LH_ASSERT(!alloc->sealed);
    alloc->sealed = true;
}

void lh_alloc_unseal(struct lh_alloc *alloc)
{
    LH_ASSERT(alloc->sealed);
    alloc->sealed = false;
}
