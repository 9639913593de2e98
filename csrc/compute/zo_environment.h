/*
 * The default floating-point environment, and the caller's again. Where this is included no number
 * is made outside the vector unit; fesetenv() also sets x87's, which takes as long as some hundreds
 * of z.
 */
#ifndef LH_COMPUTE_ZO_ENVIRONMENT_H
#define LH_COMPUTE_ZO_ENVIRONMENT_H

#include <stdint.h>

#if defined(__x86_64__)

#include <immintrin.h>

typedef uint32_t zo_environment_t;

static inline zo_environment_t zo_environment_enter(void)
{
    const uint32_t nearest_and_masked = 0x1F80;
    zo_environment_t before = _mm_getcsr();
    _mm_setcsr(nearest_and_masked);
    return before;
}

static inline void zo_environment_leave(zo_environment_t before)
{
    _mm_setcsr(before);
}

#else

#include <fenv.h>

typedef fenv_t zo_environment_t;

static inline zo_environment_t zo_environment_enter(void)
{
    zo_environment_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    return before;
}

static inline void zo_environment_leave(zo_environment_t before)
{
    fesetenv(&before);
}

#endif

#endif
