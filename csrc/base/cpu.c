#include "base/cpu.h"

#include <stdlib.h>
#include <string.h>

static const char *const names[LH_CPU_ISA_COUNT] = {"sse2", "sse42", "avx2", "avx512",
                                                    "vpclmulqdq"};
static bool has[LH_CPU_ISA_COUNT];
static bool is_cap_invalid;

/* Whether this processor has the instructions that isa adds. */
static bool is_supported(enum lh_cpu_isa isa)
{
#if defined(__x86_64__)
    switch (isa) {
    case LH_CPU_ISA_SSE2:
        return true;
    case LH_CPU_ISA_SSE42:
        return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
    case LH_CPU_ISA_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("f16c");
    case LH_CPU_ISA_AVX512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    case LH_CPU_ISA_VPCLMULQDQ:
        return __builtin_cpu_supports("vpclmulqdq");
    default:
        return false;
    }
#else
    (void)isa;
    return false;
#endif
}

__attribute__((constructor)) static void cpu_init(void)
{
    const char *cap = getenv("LOHAN_MAX_CPU_ISA");
    int last = cap && *cap ? 0 : LH_CPU_ISA_VPCLMULQDQ;
    while (cap && *cap && last < LH_CPU_ISA_COUNT && strcmp(cap, names[last]) != 0)
        last++;
    is_cap_invalid = last == LH_CPU_ISA_COUNT;
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (int isa = 0; isa < LH_CPU_ISA_COUNT; isa++)
        has[isa] = isa <= last && is_supported((enum lh_cpu_isa)isa);
}

bool lh_cpu_has(enum lh_cpu_isa isa)
{
    return has[isa];
}

const char *lh_cpu_invalid_cap(void)
{
    if (is_cap_invalid)
        cpu_init();
    return is_cap_invalid ? getenv("LOHAN_MAX_CPU_ISA") : NULL;
}
