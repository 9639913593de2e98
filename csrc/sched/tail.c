/*
 * The end of the caller's scalars, for a model whose buffers are in an accelerator's memory.
 *
 * A commit has the values that the model's buffers have at the step's close, when the accelerator
 * may still be computing them. The training thread does not wait for that: it closes the step with
 * scalars whose last bytes are undefined. The engine copies these bytes after the device has
 * computed them, and the step ends, with its commit, after that copy.
 *
 *      lh_tail_post    lh_engine_close      copy                      commit
 *      fence on the stream ----------------> into opts.tail_memory --> into the scalars
 */
#include <errno.h>
#include <string.h>

#include "sched/engine_private.h"

int lh_tail_post(struct lh_engine *engine, const void *device, uint64_t bytes, int timeout_ms)
{
    struct lh_tail *tail = engine->tail;
    int rc = lh_engine_over_wait(engine, timeout_ms);
    if (rc <= 0)
        return rc;
    if (atomic_load(&engine->failed))
        return lh_core_fail_code(engine);
    if (bytes > engine->opts.tail_bytes)
        return -E2BIG;
    LH_ASSERT(device && bytes > 0 && !tail->is_wanted); /* the previous step is over */
    tail->device = device;
    tail->bytes = bytes;
    lh_stream_record(engine, tail->is_computed);
    return 1;
}

static void step_closed(struct lh_engine *engine)
{
    struct lh_tail *tail = engine->tail;
    LH_ASSERT(!tail->is_wanted && !tail->is_copying);
    tail->is_wanted = tail->bytes > 0;
}

/* What was announced was a part of the scalars that were refused. */
static void close_refused(struct lh_engine *engine)
{
    engine->tail->bytes = 0;
}

static void copied(struct lh_engine *engine, struct lh_copy *copy)
{
    struct lh_tail *tail = engine->tail;
    (void)copy;
    LH_ASSERT(tail->is_copying && tail->bytes <= engine->scalar_bytes);
    memcpy(engine->scalars + engine->scalar_bytes - tail->bytes, engine->opts.tail_memory,
           tail->bytes);
    tail->is_copying = false;
    tail->is_wanted = false;
}

/* The step is over, or an aborted one was not closed after its tail was announced. */
static void step_forgotten(struct lh_engine *engine)
{
    LH_ASSERT(!engine->tail->is_copying);
    engine->tail->bytes = 0;
    engine->tail->is_wanted = false;
}

static bool pump_before(struct lh_engine *engine)
{
    struct lh_tail *tail = engine->tail;
    if (!tail->is_wanted || tail->is_copying || !lh_copy_is_free(engine, LH_COPY_USER_UNIT))
        return false;
    struct lh_copy *copy = lh_copy_take(engine, LH_COPY_USER_UNIT);
    struct lh_engine_step_stats *stats = lh_core_stats(engine, engine->step);
    copy->done = copied;
    copy->what = "a copy of buffers";
    copy->unit = LH_UNIT_NONE;
    copy->dev = (struct lh_dev_copy){
        .direction = LH_DEV_DIRECTION_OUT,
        .host = engine->opts.tail_memory,
        .device = (void *)(uintptr_t)tail->device,
        .bytes = tail->bytes,
        .after = tail->is_computed,
    };
    stats->planned_bytes[LH_ENGINE_LINK_COPY_OUT] += tail->bytes;
    stats->bytes[LH_ENGINE_LINK_COPY_OUT] += tail->bytes;
    tail->is_copying = lh_copy_submit(engine, copy);
    return tail->is_copying;
}

static bool step_may_end(const struct lh_engine *engine)
{
    return !engine->tail->is_wanted;
}

int lh_tail_create(struct lh_engine *engine, struct lh_error *err)
{
    LH_ASSERT(engine->dev && engine->opts.tail_memory);
    LH_TRY(LH_ENGINE_PART_CREATE(engine, tail, err));
    return engine->dev->ops->fence_create(engine->dev, &engine->tail->is_computed, err);
}

void lh_tail_destroy(struct lh_engine *engine)
{
    if (engine->tail && engine->tail->is_computed)
        engine->dev->ops->fence_destroy(engine->dev, engine->tail->is_computed);
}

const struct lh_feature lh_tail_feature = {
    .name = "tail",
    .close_refused = close_refused,
    .step_closed = step_closed,
    .step_forgotten = step_forgotten,
    .step_may_end = step_may_end,
    .pump_before = pump_before,
};
