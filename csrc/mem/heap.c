#include "mem/heap.h"

#include <limits.h>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

bool lh_heap_keep(void)
{
#if defined(__GLIBC__)
    /* Above these thresholds glibc gives an allocation its own mapping, and trims the heap. */
    return mallopt(M_MMAP_THRESHOLD, 1 << 30) == 1 && mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
#else
    return false;
#endif
}
