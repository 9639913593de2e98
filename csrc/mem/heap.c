#include "mem/heap.h"

#include <limits.h>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

bool lh_heap_keep(void)
{
#if defined(__GLIBC__)
    /* glibc gives an allocation above the first limit its own mapping, and trims a heap whose
     * unused end exceeds the second one. */
    return mallopt(M_MMAP_THRESHOLD, 1 << 30) == 1 && mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
#else
    return false;
#endif
}
