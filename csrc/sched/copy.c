#include "sched/copy.h"

#include <inttypes.h>
#include <string.h>

#include "sched/engine_private.h"

/* The share of the table that is reserved for each user: the inverse of a fraction. */
#define RESERVED_SHARE 8

bool lh_copy_is_free(const struct lh_engine *engine, enum lh_copy_user user)
{
    const struct lh_copies *copies = engine->copies;
    uint32_t least = engine->opts.copy_count / RESERVED_SHARE;
    uint32_t taken = 0;
    uint32_t reserved = 0; /* for the others */
    for (uint32_t i = 0; i < LH_COPY_USER_COUNT; i++) {
        taken += copies->taken[i];
        if (i != user && copies->taken[i] < least)
            reserved += least - copies->taken[i];
    }
    LH_ASSERT((taken < engine->opts.copy_count) == (copies->free != NULL));
    return taken + reserved < engine->opts.copy_count;
}

struct lh_copy *lh_copy_take(struct lh_engine *engine, enum lh_copy_user user)
{
    struct lh_copy *copy = engine->copies->free;
    LH_ASSERT(copy != NULL && lh_copy_is_free(engine, user));
    engine->copies->free = copy->next_free;
    engine->copies->taken[user]++;
    copy->user = user;
    return copy;
}

static void give(struct lh_engine *engine, struct lh_copy *copy)
{
    copy->next_free = engine->copies->free;
    engine->copies->free = copy;
}

static void give_back(struct lh_engine *engine, struct lh_copy *copy)
{
    LH_ASSERT(engine->copies->taken[copy->user] > 0);
    engine->copies->taken[copy->user]--;
    give(engine, copy);
}

bool lh_copy_submit(struct lh_engine *engine, struct lh_copy *copy)
{
    struct lh_error err = {0};
    LH_ASSERT(copy->done && copy->what && (copy->dev.bytes > 0 || copy->dev.after));
    LH_ASSERT(engine->copies->in_flight < engine->opts.copy_count);
    copy->dev.owner = copy;
    if (engine->dev->ops->submit(engine->dev, &copy->dev, &err) < 0) {
        lh_core_device_fail(engine, &err, copy->what);
        give_back(engine, copy);
        return false;
    }
    engine->copies->in_flight++;
    return true;
}

/*
 * How long a copy has kept its link busy. Copies that are aside may be executed at the same time as
 * the others, and the link then has the time of only one of them.
 */
static uint64_t busy_ns(struct lh_engine *engine, const struct lh_dev_copy *copy)
{
    struct lh_copy_spans *own = &engine->copies->spans[copy->is_aside];
    const struct lh_copy_spans *other = &engine->copies->spans[!copy->is_aside];
    uint64_t count = lh_min_u64(other->count, LH_COPY_SPAN_COUNT);
    uint64_t shared_ns = 0;
    uint64_t ns = copy->completed_ns - copy->started_ns;
    if (copy->direction == LH_DEV_DIRECTION_OUT)
        return ns;
    own->start_ns[own->count % LH_COPY_SPAN_COUNT] = copy->started_ns;
    own->end_ns[own->count++ % LH_COPY_SPAN_COUNT] = copy->completed_ns;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t start_ns = lh_max_u64(copy->started_ns, other->start_ns[i]);
        uint64_t end_ns = lh_min_u64(copy->completed_ns, other->end_ns[i]);
        shared_ns += end_ns > start_ns ? end_ns - start_ns : 0;
    }
    return ns - lh_min_u64(ns, shared_ns);
}

/* Count the time of a copy, which is not a marker. */
static void time_count(struct lh_engine *engine, const struct lh_copy *copy)
{
    bool is_in = copy->dev.direction == LH_DEV_DIRECTION_IN;
    lh_core_trace_add(engine,
                      (struct lh_engine_trace_event){
                          .kind = is_in ? LH_ENGINE_TRACE_COPY_IN : LH_ENGINE_TRACE_COPY_OUT,
                          .unit = copy->unit,
                          .start_ns = copy->dev.started_ns,
                          .end_ns = copy->dev.completed_ns,
                          .bytes = copy->dev.bytes,
                      });
    lh_core_stats(engine, lh_core_step(engine))->copy_busy_ns[copy->dev.direction] +=
        busy_ns(engine, &copy->dev);
}

static void copy_done(struct lh_engine *engine, struct lh_copy *copy)
{
    bool is_in = copy->dev.direction == LH_DEV_DIRECTION_IN;
    if (copy->dev.result < 0) {
        struct lh_error err = {0};
        lh_error_set(&err, copy->dev.result, "%" PRIu64 " bytes %s the device: %s", copy->dev.bytes,
                     is_in ? "to" : "from", strerror(-copy->dev.result));
        lh_core_device_fail(engine, &err, copy->what);
        return;
    }
    if (copy->dev.bytes > 0)
        time_count(engine, copy);
    copy->done(engine, copy);
}

bool lh_copy_poll(struct lh_engine *engine)
{
    struct lh_dev_copy *done[32];
    if (!engine->dev)
        return false;
    uint32_t count = engine->dev->ops->poll(engine->dev, done, LH_COUNT_OF(done));
    LH_ASSERT(engine->copies->in_flight >= count);
    engine->copies->in_flight -= count;
    for (uint32_t i = 0; i < count; i++) {
        struct lh_copy *copy = done[i]->owner;
        LH_ASSERT(done[i] == &copy->dev);
        if (!atomic_load(&engine->failed))
            copy_done(engine, copy);
        give_back(engine, copy);
    }
    return count > 0;
}

int lh_copy_create(struct lh_engine *engine, struct lh_error *err)
{
    uint32_t count = engine->opts.copy_count;
    LH_TRY(LH_ENGINE_PART_CREATE(engine, copies, err));
    engine->copies->all = lh_alloc_zeroed(engine->alloc, count, sizeof(*engine->copies->all));
    if (!engine->copies->all)
        return lh_error_set(err, -ENOMEM, "no memory for %u copies", count);
    for (uint32_t i = 0; i < count; i++)
        give(engine, &engine->copies->all[i]);
    return 0;
}

void lh_copy_destroy(struct lh_engine *engine)
{
    if (engine->copies)
        lh_free(engine->alloc, engine->copies->all);
}
