/* Scalars of a step, the choice of a kernel, and masters split into P16 and residual and back. */
#include <fenv.h>
#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "compute/adam_kernels.h"

struct lh_adam_scalars lh_adam_scalars_make(const struct lh_adam_hyper *hyper, uint64_t step,
                                            double gradient_scale)
{
    double bias1, bias2;

    LH_ASSERT(step >= 1);
    bias1 = 1.0 - pow(hyper->beta1, (double)step);
    bias2 = 1.0 - pow(hyper->beta2, (double)step);
    return (struct lh_adam_scalars){
        .gradient_scale = (float)gradient_scale,
        .beta1_rest = (float)(1.0 - hyper->beta1),
        .beta2 = (float)hyper->beta2,
        .beta2_rest = (float)(1.0 - hyper->beta2),
        .bias2_sqrt_inverse = (float)(1.0 / sqrt(bias2)),
        .eps = (float)hyper->eps,
        .step_size = (float)(hyper->lr / bias1),
        .decay = (float)(1.0 - hyper->lr * hyper->weight_decay),
    };
}

/* Best first; each needs all that the ones below it need, so a machine runs a tail of the table. */
static const struct lh_adam_kernel kernels[] = {
#if defined(__x86_64__)
    {"avx512", lh_adam_avx512, lh_adam_avx512_folding},
    {"avx512_tiles", lh_adam_avx512, NULL},
    {"avx2", lh_adam_avx2, NULL},
#endif
    {"ref", lh_adam_ref, NULL},
};

#if defined(__x86_64__)
static int kernel_best_index(void)
{
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return 3;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return 2;
    return __builtin_cpu_supports("vpclmulqdq") ? 0 : 1;
}
#else
static int kernel_best_index(void)
{
    return 0;
}
#endif

int lh_adam_kernels(const struct lh_adam_kernel **kernels_out)
{
    int best = kernel_best_index();

    *kernels_out = kernels + best;
    return (int)LH_COUNT_OF(kernels) - best;
}

void lh_adam_update(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars)
{
    const struct lh_adam_kernel *best;
    fenv_t environment;

    lh_adam_kernels(&best);
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);
    best->run(run, scalars);
    fesetenv(&environment);
}

void lh_adam_split(const float *master, uint16_t *param, int16_t *residual, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits;

        memcpy(&bits, master + i, sizeof(bits));
        if ((bits & 0x7FFFFFFF) > 0x7F800000)
            bits = (bits & 0x80000000) | LH_ADAM_NAN_BITS;
        param[i] = (uint16_t)((bits + 0x8000) >> 16);
        residual[i] = (int16_t)(uint16_t)bits;
    }
}

void lh_adam_join(const uint16_t *param, const int16_t *residual, float *master, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits = ((uint32_t)param[i] << 16) + (uint32_t)residual[i];

        memcpy(master + i, &bits, sizeof(bits));
    }
}
