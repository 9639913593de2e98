#include "sched/stream.h"

#include "sched/engine_private.h"

/* Two steps have counters at the same time. */
static uint32_t gap_kind(uint64_t step, bool is_param)
{
    uint32_t kind = (uint32_t)(step % 2) * 2 + is_param;
    LH_ASSERT(kind < LH_DEV_GAP_KIND_COUNT);
    return kind;
}

void lh_stream_record(struct lh_engine *engine, struct lh_dev_fence *fence)
{
    struct lh_error err = {0};
    if (!engine->dev)
        return;
    if (engine->dev->ops->record(engine->dev, fence, atomic_load(&engine->stream), &err) < 0)
        lh_core_device_fail(engine, &err, "the end of a computation");
}

int lh_stream_wait(struct lh_engine *engine, struct lh_dev_fence *fence, uint32_t unit,
                   const char *what)
{
    struct lh_dev *dev = engine->dev;
    struct lh_dev_gap *gap = NULL;
    struct lh_error err = {0};
    if (!dev || !dev->ops->is_ordered || (dev->ops->has_passed && dev->ops->has_passed(dev, fence)))
        return 0;
    uint64_t start = lh_core_now(engine);
    lh_stream_gap_begin(engine, &gap);
    int rc = dev->ops->wait(dev, fence, atomic_load(&engine->stream), &err);
    lh_stream_gap_end(engine, gap, unit != LH_UNIT_NONE);
    uint64_t end = lh_core_now(engine);
    if (end - start > LH_WAIT_NS_MIN)
        lh_engine_post(engine, LH_MESSAGE_WAITED, unit, start, end);
    if (rc == 0)
        return 0;
    lh_core_device_fail(engine, &err, what);
    return lh_core_fail_code(engine);
}

void lh_stream_synchronize(struct lh_engine *engine)
{
    struct lh_error err = {0};
    if (engine->opts.units_in_memory && engine->dev->ops->synchronize(engine->dev, &err) < 0)
        lh_core_device_fail(engine, &err, "the end of all computation");
}

void lh_stream_gap_begin(struct lh_engine *engine, struct lh_dev_gap **gap_out)
{
    struct lh_dev *dev = engine->dev;
    LH_ASSERT(dev != NULL);
    *gap_out = NULL;
    if (dev->ops->gap_begin && !lh_core_is_forked(engine)) /* a child's driver has no context */
        *gap_out = dev->ops->gap_begin(dev, atomic_load(&engine->stream));
}

void lh_stream_gap_end(struct lh_engine *engine, struct lh_dev_gap *gap, bool is_param)
{
    struct lh_dev *dev = engine->dev;
    if (gap)
        dev->ops->gap_end(dev, gap, atomic_load(&engine->stream),
                          gap_kind(lh_engine_step(engine) + 1, is_param));
}

void lh_stream_stats_correct(struct lh_engine *engine, struct lh_engine_step_stats *stats)
{
    struct lh_dev *dev = engine->dev;
    uint64_t param_ns = 0;
    uint64_t gradient_ns = 0;
    if (!dev->ops->gaps_take || !dev->ops->gaps_take(dev, gap_kind(stats->step, true), &param_ns) ||
        !dev->ops->gaps_take(dev, gap_kind(stats->step, false), &gradient_ns))
        return;
    stats->param_wait_ns = param_ns;
    stats->gradient_wait_ns = gradient_ns;
}
