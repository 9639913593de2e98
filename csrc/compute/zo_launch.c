#include "compute/zo_launch.h"

#include "base/assert.h"
#include "compute/zo_kernels.h"

/* Enough threads for any GPU; each goes on with what is left. */
#define GROUP_COUNT_MAX (UINT64_C(1) << 16)

int lh_zo_launch(struct lh_dev *dev, struct lh_dev_kernel *kernel, void *stream, float *values,
                 uint64_t first, uint64_t count, const struct lh_zo_op *ops, uint32_t op_count,
                 struct lh_error *err)
{
    struct lh_zo_batch batch = {.address = (uintptr_t)values, .first = first, .count = count};
    const struct lh_zo_stream *stream_of_z = NULL;
    LH_ASSERT(first <= LH_ZO_ELEMENT_COUNT_MAX && count <= LH_ZO_ELEMENT_COUNT_MAX - first);
    LH_ASSERT(op_count == 0 || !ops[0].is_same);
    if (count == 0)
        return 0;
    uint64_t block_count =
        lh_div_ceil(first + count, LH_ZO_BLOCK) - first / LH_ZO_BLOCK; /* that it touches */
    uint64_t group_count = lh_div_ceil(block_count * LH_ZO_COUNTERS, LH_ZO_BATCH_THREADS);
    group_count = lh_min_u64(group_count, GROUP_COUNT_MAX);
    for (uint32_t i = 0; i < op_count; i++) {
        struct lh_zo_op *op = &batch.ops[batch.op_count++];
        LH_ASSERT(ops[i].stream.sample < LH_ZO_SAMPLE_COUNT_MAX);
        *op = ops[i];
        if (!op->is_same)
            stream_of_z = &ops[i].stream;
        /* No z is there from the batch before: its first op makes its own again. */
        op->stream = *stream_of_z;
        op->is_same = op->is_same && batch.op_count > 1;
        if (batch.op_count < LH_ZO_BATCH_OPS && i + 1 < op_count)
            continue;
        LH_TRY(dev->ops->launch(dev, kernel, stream, (uint32_t)group_count, LH_ZO_BATCH_THREADS,
                                &batch, err));
        batch.op_count = 0;
    }
    return 0;
}
