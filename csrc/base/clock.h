/*
 * A clock that is passed in, so that a simulator can supply virtual time: the core never reads the
 * time from the operating system directly.
 */
#ifndef LH_BASE_CLOCK_H
#define LH_BASE_CLOCK_H

#include "base/base.h"

struct lh_clock {
    uint64_t (*now_ns)(void *context); /* monotonic */
    void *context;
};

/* The operating system's CLOCK_MONOTONIC. */
struct lh_clock lh_clock_real(void);

static inline uint64_t lh_clock_now_ns(const struct lh_clock *clock)
{
    return clock->now_ns(clock->context);
}

#endif
