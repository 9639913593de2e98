#include "compute/cast.h"

#include <fenv.h>
#include <string.h>

#include "base/assert.h"
#include "base/cpu.h"
#include "compute/cast_kernels.h"
#include "compute/half.h"

/* The definition: one element at a time. */
static bool differs(const uint16_t *cast, enum lh_dtype dtype, const float *values, uint64_t count)
{
    uint32_t difference = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof(bits));
        difference |=
            (uint32_t)((dtype == LH_DTYPE_F16 ? lh_half_round(bits) : lh_bf16_round(bits)) ^
                       cast[i]);
    }
    return difference != 0;
}

/* The SIMD kernel for dtype; NULL if this machine has none. */
static lh_cast_differs_fn kernel_of(enum lh_dtype dtype)
{
#if defined(__x86_64__)
    if (lh_cpu_has(LH_CPU_ISA_AVX2))
        return dtype == LH_DTYPE_F16 ? lh_cast_half_differs_avx2 : lh_cast_bf16_differs_avx2;
    return NULL;
#elif defined(__aarch64__)
    return dtype == LH_DTYPE_F16 ? lh_cast_half_differs_neon : lh_cast_bf16_differs_neon;
#else
    (void)dtype;
    return NULL;
#endif
}

bool lh_cast_is_of(const void *cast, enum lh_dtype dtype, const float *values, uint64_t count)
{
    const uint16_t *elements = cast;
    const lh_cast_differs_fn kernel = kernel_of(dtype);
    bool differ = false;
    fenv_t environment;
    uint64_t i = 0;

    LH_ASSERT(dtype == LH_DTYPE_BF16 || dtype == LH_DTYPE_F16);
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);
    for (; !differ && i < count; i += LH_CAST_BATCH) {
        if (kernel && count - i >= LH_CAST_BATCH)
            differ = kernel(elements + i, values + i);
        else
            differ = differs(elements + i, dtype, values + i, lh_min_u64(LH_CAST_BATCH, count - i));
    }
    fesetenv(&environment);
    return !differ;
}
