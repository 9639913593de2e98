#include "base/clock.h"

#include <time.h>

#include "base/assert.h"

static uint64_t now_monotonic_ns(void *context)
{
    (void)context;
    struct timespec now;
    int rc = clock_gettime(CLOCK_MONOTONIC, &now);
    LH_ASSERT(rc == 0);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

struct lh_clock lh_clock_real(void)
{
    return (struct lh_clock){.now_ns = now_monotonic_ns, .context = NULL};
}
