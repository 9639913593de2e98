#include "compute/zo_launch.h"

#include "base/assert.h"
#include "compute/zo_kernels.h"

/* The limit gives enough threads for any GPU; every thread processes further counters in a loop. */
#define GROUP_COUNT_MAX (UINT64_C(1) << 16)

/* Where the batches of a call are launched. */
struct launch {
    struct lh_dev *dev;
    struct lh_dev_kernel *kernel;
    void *stream;
    struct lh_error *err;
    struct lh_zo_stream stream_of_z; /* the stream of the previous op's z */
};

/* Launch a batch. No z survives from the previous launch, so the first op regenerates its z. */
static int batch_launch(struct launch *launch, struct lh_zo_batch *batch,
                        const struct lh_zo_op *ops, uint32_t op_count)
{
    uint64_t block_count = lh_div_ceil(batch->first + batch->count, LH_ZO_BLOCK) -
                           batch->first / LH_ZO_BLOCK; /* the blocks that the batch touches */
    uint64_t group_count = lh_div_ceil(block_count * LH_ZO_COUNTERS, LH_ZO_BATCH_THREADS);
    group_count = lh_min_u64(group_count, GROUP_COUNT_MAX);
    for (uint32_t i = 0; i < op_count; i++) {
        LH_ASSERT(ops[i].stream.sample < LH_ZO_SAMPLE_COUNT_MAX);
        if (!ops[i].is_same)
            launch->stream_of_z = ops[i].stream;
        batch->ops[i] = ops[i];
        batch->ops[i].stream = launch->stream_of_z;
        batch->ops[i].is_same = ops[i].is_same && i > 0;
    }
    batch->op_count = op_count;
    return launch->dev->ops->launch(launch->dev, launch->kernel, launch->stream,
                                    (uint32_t)group_count, LH_ZO_BATCH_THREADS, batch, launch->err);
}

static void range_check(uint64_t first, uint64_t count, const struct lh_zo_op *ops,
                        uint32_t op_count)
{
    LH_ASSERT(first <= LH_ZO_ELEMENT_COUNT_MAX && count <= LH_ZO_ELEMENT_COUNT_MAX - first);
    LH_ASSERT(op_count == 0 || !ops[0].is_same);
}

int lh_zo_launch(struct lh_dev *dev, struct lh_dev_kernel *kernel, void *stream, float *values,
                 uint64_t first, uint64_t count, const struct lh_zo_op *ops, uint32_t op_count,
                 struct lh_error *err)
{
    struct launch launch = {dev, kernel, stream, err, {0}};
    struct lh_zo_batch batch = {.values = (uintptr_t)values, .first = first, .count = count};
    range_check(first, count, ops, op_count);
    for (uint32_t i = 0, next; count > 0 && i < op_count; i = next) {
        next = i + LH_ZO_BATCH_OPS < op_count ? i + LH_ZO_BATCH_OPS : op_count;
        LH_TRY(batch_launch(&launch, &batch, ops + i, next - i));
    }
    return 0;
}

/* The end of the longest batch from op `begin` on that ends after a ROUND or after the last op. */
static uint32_t batch_end(const struct lh_zo_op *ops, uint32_t begin, uint32_t op_count)
{
    if (op_count - begin <= LH_ZO_BATCH_OPS)
        return op_count;
    uint32_t end = begin + LH_ZO_BATCH_OPS;
    while (end > begin && ops[end - 1].kind != LH_ZO_OP_ROUND)
        end--;
    return end;
}

int lh_zo_launch_check(const struct lh_zo_op *ops, uint32_t op_count, struct lh_error *err)
{
    for (uint32_t i = 0, end; i < op_count; i = end) {
        end = batch_end(ops, i, op_count);
        if (end == i)
            return lh_error_set(err, -EINVAL,
                                "a launch takes at most %d operations and can be split only after a"
                                " round, but more than that of the %u operations follow one another"
                                " without a round",
                                LH_ZO_BATCH_OPS, op_count);
    }
    return 0;
}

/*
 * Only the state survives between two batches, and it is exact only after a ROUND, so ops are split
 * into batches there. The last batch stores the values.
 */
int lh_zo_launch_lead(struct lh_dev *dev, struct lh_dev_kernel *kernel, void *stream,
                      const struct lh_zo_kept *kept, uint64_t first, uint64_t count,
                      const struct lh_zo_op *ops, uint32_t op_count, struct lh_error *err)
{
    struct launch launch = {dev, kernel, stream, err, {0}};
    struct lh_zo_batch batch = {.state = (uintptr_t)kept->state,
                                .first = first,
                                .count = count,
                                .state_format = kept->state_format,
                                .value_format = kept->value_format};
    uint32_t i = 0;
    range_check(first, count, ops, op_count);
    LH_ASSERT(kept->value_format != LH_ZO_FORMAT_F8);
    LH_TRY(lh_zo_launch_check(ops, op_count, err));
    do {
        uint32_t end = batch_end(ops, i, op_count);
        for (uint32_t j = i; j < end; j++)
            LH_ASSERT(ops[j].kind != LH_ZO_OP_ROUND || ops[j].format == kept->state_format);
        batch.values = end == op_count ? (uintptr_t)kept->values : 0;
        if (count > 0)
            LH_TRY(batch_launch(&launch, &batch, ops + i, end - i));
        i = end;
    } while (i < op_count);
    return 0;
}
