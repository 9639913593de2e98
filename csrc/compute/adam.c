/* The scalars of a step, kernel selection, and conversion between masters and P16 + residual. */
#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "base/assert.h"
#include "base/cpu.h"
#include "compute/adam_kernels.h"

#if defined(__aarch64__)
#include <sys/auxv.h> /* also defines HWCAP_* */
#endif

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
        .average_rest = (float)hyper->average_rest,
    };
}

/* All kernels, best first. */
static const struct lh_adam_kernel kernels[] = {
#if defined(__x86_64__)
    {"avx512", lh_rule_avx512_run, lh_rule_avx512_folding, lh_rule_avx512_stored,
     &lh_adam_states_avx512},
    {"avx512_pclmul", lh_rule_avx512_run, lh_rule_avx512_pclmul, lh_rule_avx512_stored,
     &lh_adam_states_avx512},
    {"avx512_tiles", lh_rule_avx512_run, NULL, lh_rule_avx512_stored, &lh_adam_states_avx512},
    {"avx2", lh_rule_avx2_run, lh_rule_avx2_folding, lh_rule_avx2_stored, &lh_adam_states_avx2},
    {"avx2_pclmul", lh_rule_avx2_run, lh_rule_avx2_pclmul, lh_rule_avx2_stored,
     &lh_adam_states_avx2},
    {"avx2_tiles", lh_rule_avx2_run, NULL, lh_rule_avx2_stored, &lh_adam_states_avx2},
#elif defined(__aarch64__)
    {"neon", lh_rule_neon_run, lh_rule_neon_folding, lh_rule_neon_stored, &lh_adam_states_neon},
    {"neon_tiles", lh_rule_neon_run, NULL, lh_rule_neon_stored, &lh_adam_states_neon},
#endif
    {"ref", lh_rule_ref, NULL, NULL, &lh_adam_states_ref},
};

/* The kernels that this machine can run. */
static struct lh_adam_kernel kernels_here[LH_COUNT_OF(kernels)];
static int kernels_here_count;
static pthread_once_t kernels_once = PTHREAD_ONCE_INIT;

#if defined(__x86_64__)
static bool needs_vpclmulqdq(const struct lh_adam_kernel *kernel)
{
    return kernel->run_checking == lh_rule_avx512_folding ||
           kernel->run_checking == lh_rule_avx2_folding;
}
#endif

static bool kernel_runs(const struct lh_adam_kernel *kernel)
{
#if defined(__x86_64__)
    if (kernel->run == lh_rule_avx512_run && !lh_cpu_has(LH_CPU_ISA_AVX512))
        return false;
    if (kernel->run != lh_rule_ref && !lh_cpu_has(LH_CPU_ISA_AVX2))
        return false;
    if (kernel->run_checking && !lh_cpu_has(LH_CPU_ISA_SSE42))
        return false;
    if (needs_vpclmulqdq(kernel) && !lh_cpu_has(LH_CPU_ISA_VPCLMULQDQ))
        return false;
#elif defined(__aarch64__)
    if (kernel->run_checking && (~getauxval(AT_HWCAP) & (HWCAP_CRC32 | HWCAP_PMULL)) != 0)
        return false;
#endif
    return kernel->run;
}

static void kernels_choose(void)
{
    for (size_t k = 0; k < LH_COUNT_OF(kernels); k++)
        if (kernel_runs(kernels + k))
            kernels_here[kernels_here_count++] = kernels[k];
}

int lh_adam_kernels(const struct lh_adam_kernel **kernels_out)
{
    int rc = pthread_once(&kernels_once, kernels_choose);
    LH_ASSERT(rc == 0);
    *kernels_out = kernels_here;
    return kernels_here_count;
}

void lh_adam_update(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars)
{
    const struct lh_adam_kernel *best;
    fenv_t environment;

    lh_adam_kernels(&best);
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);
    best->run[LH_RULE_ADAMW](run, scalars);
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
