/* An exponential moving average of fp32 masters. See lh_adam_average() in adam.h. */
#include <fenv.h>
#include <math.h>
#include <string.h>

#include "base/cpu.h"
#include "compute/adam_kernels.h"

/* The definition: one element at a time, with every rounding explicit. */
void lh_adam_average_ref(float *average, const float *values, uint64_t count, float rest)
{
    bool is_small = fabsf(rest) < 0.5F;

    for (uint64_t i = 0; i < count; i++) {
        float p = values[i];
        float e = average[i];
        float made = is_small       ? fmaf(rest, p - e, e)
                     : rest == 1.0F ? p
                                    : fmaf(rest - 1.0F, p - e, p);
        uint32_t bits;

        memcpy(&bits, &made, sizeof(bits));
        if (isnan(made))
            bits = LH_ADAM_NAN_BITS;
        memcpy(&average[i], &bits, sizeof(bits));
    }
}

void lh_adam_average(float *average, const float *values, uint64_t count, float rest)
{
    fenv_t environment;

    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);
#if defined(__x86_64__)
    if (lh_cpu_has(LH_CPU_ISA_AVX2))
        lh_adam_average_avx2(average, values, count, rest);
    else
#endif
        lh_adam_average_ref(average, values, count, rest);
    fesetenv(&environment);
}
