/*
 * The bits of floats, and a thread with a non-default floating-point environment: it rounds upwards
 * and flushes denormals, as a thread and its children do after torch.set_flush_denormal(True).
 */
#ifndef FP_FIXTURE_H
#define FP_FIXTURE_H

#include <fenv.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define FP_FLUSH UINT64_C(0x8040) /* the bits that flush results and operands to zero */
#else
#define FP_FLUSH (UINT64_C(1) << 24)
#endif

static inline float float_of(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline uint64_t fp_control_get(void)
{
#if defined(__x86_64__)
    return _mm_getcsr();
#elif defined(__aarch64__)
    uint64_t control;

    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return control;
#else
    return FP_FLUSH; /* this processor's control bit is not known here */
#endif
}

static inline void fp_environment_spoil(void)
{
    fesetround(FE_UPWARD);
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | (unsigned)FP_FLUSH);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(fp_control_get() | FP_FLUSH));
#endif
}

static inline bool fp_environment_is_spoilt(void)
{
    return (fp_control_get() & FP_FLUSH) == FP_FLUSH && fegetround() == FE_UPWARD;
}

#endif
