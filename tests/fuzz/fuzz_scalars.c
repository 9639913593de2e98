/*
 * The data that a commit carries: the caller's part is within them, and a parser finds what was
 * made.
 */
#include "fuzz.h"
#include "sched/engine.h"

static void made_check(const uint8_t *data, size_t size)
{
    const uint64_t steps[3] = {1, UINT64_MAX, 0};
    uint64_t found_bytes = 1;
    uint32_t count = (uint32_t)size % 4;
    uint64_t overhead = lh_scalars_overhead_bytes(count);
    uint8_t *scalars = fuzz_zeroed(overhead + size);
    lh_scalars_make(steps, count, data, size, scalars);
    const uint8_t *found = lh_scalars_find(scalars, overhead + size, &found_bytes);
    LH_ASSERT(found == scalars + overhead && found_bytes == size);
    LH_ASSERT(size == 0 || memcmp(found, data, size) == 0);
    LH_ASSERT(lh_scalars_find(scalars, overhead + size + 1, &found_bytes) == NULL);
    free(scalars);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t found_bytes = 1;
    /* Allocate exactly this size, so that a sanitizer detects reads beyond it. */
    uint8_t *scalars = fuzz_zeroed(size);
    if (size > 0)
        memcpy(scalars, data, size);
    const uint8_t *found = lh_scalars_find(scalars, size, &found_bytes);
    if (found != NULL)
        LH_ASSERT(found >= scalars && found + found_bytes == scalars + size);
    else
        LH_ASSERT(found_bytes == 0);
    LH_ASSERT(lh_scalars_find(NULL, size, &found_bytes) == NULL && found_bytes == 0);
    free(scalars);
    if (size < 4)
        made_check(data, size);
    return 0;
}
