/*
 * The instruction sets that kernels may use: those of this processor, up to a cap.
 *
 * The environment variable LOHAN_MAX_CPU_ISA names the cap: with it, the kernels are those of an
 * older processor, to reproduce what runs there. The names, each of which includes all before it:
 *
 *      sse2            nothing beyond x86-64 itself: the portable kernels
 *      sse42           SSE4.2 and PCLMULQDQ
 *      avx2            AVX2, FMA and F16C
 *      avx512          AVX-512 F, BW, VL and DQ, as processors before Ice Lake have it
 *      vpclmulqdq      everything: also VPCLMULQDQ (the default)
 *
 * On other machines the cap has no effect.
 *
 * Thread: any. The variable is read once, before main(), unless it is invalid then.
 */
#ifndef LH_BASE_CPU_H
#define LH_BASE_CPU_H

#include "base/base.h"

enum lh_cpu_isa {
    LH_CPU_ISA_SSE2,
    LH_CPU_ISA_SSE42,
    LH_CPU_ISA_AVX2,
    LH_CPU_ISA_AVX512,
    LH_CPU_ISA_VPCLMULQDQ,
    LH_CPU_ISA_COUNT,
};

/* Whether kernels may use the instructions that isa adds; false on machines that are not x86-64. */
bool lh_cpu_has(enum lh_cpu_isa isa);

/* The names of LOHAN_MAX_CPU_ISA, for messages. */
#define LH_CPU_ISA_NAMES "sse2, sse42, avx2, avx512 or vpclmulqdq"

/*
 * The value of LOHAN_MAX_CPU_ISA if it is not one of the names, and thus has no effect; or NULL.
 * While it is invalid, each call reads the variable again, so that a corrected one takes effect.
 * Thread: one that may read the environment, before any kernel is used.
 */
const char *lh_cpu_invalid_cap(void);

#endif
