/*
 * Enter the default floating-point environment, and restore the caller's. Code that includes this
 * header computes only in the vector unit. So on x86-64 the functions avoid fesetenv(), which also
 * sets the x87 environment and takes as long as generating some hundreds of numbers z.
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
