#include "compute/zo.h"

#include <string.h>

#include "base/assert.h"
#include "base/cpu.h"
#include "compute/zo_environment.h"
#include "compute/zo_kernels.h"

/* All kernels, best first. */
static const struct lh_zo_kernel kernels[] = {
#if defined(__x86_64__)
    {"avx512", lh_zo_avx512, lh_zo_words_avx512, lh_zo_widen_avx512, lh_zo_narrow_avx512,
     lh_zo_cast_avx512},
    {"avx2", lh_zo_avx2, lh_zo_words_avx2, lh_zo_widen_avx2, lh_zo_narrow_avx2, lh_zo_cast_avx2},
#elif defined(__aarch64__)
    {"neon", lh_zo_neon, lh_zo_words_neon, lh_zo_widen_neon, lh_zo_narrow_neon, lh_zo_cast_neon},
#endif
    {"ref", lh_zo_ref, lh_zo_words_ref, lh_zo_widen_ref, lh_zo_narrow_ref, lh_zo_cast_ref},
};

int lh_zo_kernels(const struct lh_zo_kernel **kernels_out)
{
    int first = 0;
#if defined(__x86_64__)
    if (!lh_cpu_has(LH_CPU_ISA_AVX512))
        first = lh_cpu_has(LH_CPU_ISA_AVX2) ? 1 : 2;
#endif
    *kernels_out = kernels + first;
    return (int)LH_COUNT_OF(kernels) - first;
}

/* Apply ops to elements skip to skip + count of the block whose first element is `first`. */
static void apply_part(const struct lh_zo_kernel *kernel, float *values, const float *source,
                       uint64_t first, uint64_t skip, uint64_t count, const struct lh_zo_op *ops,
                       uint32_t op_count)
{
    float block[LH_ZO_BLOCK] = {0};
    memcpy(block + skip, source, count * sizeof(*values));
    kernel->run(block, block, first, LH_ZO_BLOCK, ops, op_count);
    memcpy(values, block + skip, count * sizeof(*values));
}

void lh_zo_apply_by(const struct lh_zo_kernel *kernel, float *values, const float *source,
                    uint64_t first, uint64_t count, const struct lh_zo_op *ops, uint32_t op_count)
{
    LH_ASSERT(first <= LH_ZO_ELEMENT_COUNT_MAX && count <= LH_ZO_ELEMENT_COUNT_MAX - first);
    LH_ASSERT(op_count == 0 || !ops[0].is_same);
    for (uint32_t i = 0; i < op_count; i++) {
        LH_ASSERT(ops[i].stream.sample < LH_ZO_SAMPLE_COUNT_MAX);
        LH_ASSERT(!ops[i].is_same ||
                  (ops[i].kind != LH_ZO_OP_ROUND && ops[i - 1].kind != LH_ZO_OP_ROUND));
    }
    if (count == 0)
        return; /* the pointers may be NULL, which memcpy() does not allow */
    zo_environment_t environment = zo_environment_enter();
    uint64_t skip = first % LH_ZO_BLOCK;
    if (skip > 0) {
        uint64_t part = lh_min_u64(count, LH_ZO_BLOCK - skip);
        apply_part(kernel, values, source, first - skip, skip, part, ops, op_count);
        values += part;
        source += part;
        first += part;
        count -= part;
    }
    uint64_t whole = count / LH_ZO_BLOCK * LH_ZO_BLOCK;
    if (whole > 0)
        kernel->run(values, source, first, whole, ops, op_count);
    if (count > whole)
        apply_part(kernel, values + whole, source + whole, first + whole, 0, count - whole, ops,
                   op_count);
    zo_environment_leave(environment);
}

void lh_zo_apply(float *values, const float *source, uint64_t first, uint64_t count,
                 const struct lh_zo_op *ops, uint32_t op_count)
{
    const struct lh_zo_kernel *best = NULL;
    lh_zo_kernels(&best);
    lh_zo_apply_by(best, values, source, first, count, ops, op_count);
}
