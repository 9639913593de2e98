/*
 * Deferred updates: which units wait for the step's close, and their order after it.
 *
 * A deferred update is due when the next forward reads its unit. At the close the units are sorted
 * in the order in which this step's forward first used them, and each joins the queue of updates
 * when the next forward approaches it:
 *
 *      forward begins unit       0     1     2     3
 *      updates that were queued  0 1 2 | 3   | 4   | 5 ...
 *                                at close
 *
 * The distance is measured in bytes of parameters, so that what an update has loaded into the
 * region is still there when forward reads it. When an update is queued depends only on the order
 * of uses, never on time, so the residency plan can account for it. A wait for the step's end
 * (before the next gradient, close, abort or flush) queues all remaining updates. In a team, all
 * are queued at the close.
 *
 * Source: LoHan IV-C (active gradient offloading) updates eagerly; deferral, which is our addition,
 *         uses that an update need only be over before the next forward reads its unit.
 */
#include "sched/engine_private.h"

static bool is_awaited(const struct lh_unit *unit)
{
    return unit->parts->defer.is_deferred && unit->update.gradient_count > 0;
}

/* Sort the units whose updates wait by their first use in the step; units never used come last. */
static void line_up(struct lh_engine *engine)
{
    const struct lh_event_list *list = &engine->recording;

    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        engine->units[i].parts->defer.position = LH_CHUNK_NONE;
    engine->defer->count = 0;
    engine->defer->first = 0;
    for (uint64_t i = 0; i < list->count + engine->opts.unit_count; i++) {
        bool is_listed = i < list->count;
        uint32_t index = is_listed ? list->events[i].unit : (uint32_t)(i - list->count);
        struct lh_unit *unit = lh_engine_unit_at(engine, index);

        if (!is_awaited(unit) || unit->parts->defer.position != LH_CHUNK_NONE)
            continue;
        if (is_listed && list->events[i].kind != LH_RESIDENCY_EVENT_BEGIN)
            continue;
        LH_ASSERT(engine->defer->count < engine->opts.unit_count);
        unit->parts->defer.position = engine->defer->count;
        engine->defer->order[engine->defer->count++] = index;
    }
}

static void release_first(struct lh_engine *engine)
{
    LH_ASSERT(engine->defer->first < engine->defer->count);
    uint32_t index = engine->defer->order[engine->defer->first++];

    LH_ASSERT(!engine->units[index].parts->defer.is_released);
    engine->units[index].parts->defer.is_released = true;
    lh_update_consider(engine, index);
}

/* Queue the updates of all units before position, and of the near units from position on. */
static void release_near(struct lh_engine *engine, uint32_t position)
{
    const uint64_t near_bytes = engine->budget.region_bytes / 2;
    uint64_t ahead_bytes = 0;

    LH_ASSERT(engine->defer->first <= engine->defer->count);
    while (engine->defer->first < lh_min_u64(position, engine->defer->count))
        release_first(engine);
    for (uint32_t i = position; i < engine->defer->count; i++) {
        ahead_bytes += engine->units[engine->defer->order[i]].desc->bytes;
        if (ahead_bytes > near_bytes && i > position + 1)
            break;
        if (i == engine->defer->first)
            release_first(engine);
    }
}

static void drain(struct lh_engine *engine)
{
    while (engine->defer->first < engine->defer->count)
        release_first(engine);
}

static void step_closed(struct lh_engine *engine)
{
    LH_ASSERT(engine->step_state == LH_STEP_STATE_CLOSED);
    line_up(engine);
    lh_core_stats(engine, engine->step)->deferred_units = engine->defer->count;
    /* Other processes of a team may need the updated units earlier than this one. */
    if (engine->opts.schedule == LH_ENGINE_SCHEDULE_SERIAL || engine->opts.team)
        drain(engine);
    else
        release_near(engine, 0);
}

void lh_defer_approach(struct lh_engine *engine, uint32_t index)
{
    const struct lh_unit *unit = &engine->units[index];

    if (!engine->defer || engine->defer->first == engine->defer->count)
        return;
    if (is_awaited(unit) && unit->parts->defer.position != LH_CHUNK_NONE)
        release_near(engine, unit->parts->defer.position + 1);
}

static void step_over(struct lh_engine *engine, const struct lh_engine_step_stats *stats)
{
    (void)stats;
    LH_ASSERT(engine->defer->first == engine->defer->count);
    engine->defer->first = 0;
    engine->defer->count = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        engine->units[i].parts->defer.is_released = false;
}

void lh_defer_set(struct lh_unit *unit, bool is_deferred)
{
    unit->parts->defer.is_deferred = is_deferred;
}

void lh_defer_release(struct lh_unit *unit)
{
    LH_ASSERT(unit->update.gradient_count == unit->desc->param_count);
    unit->parts->defer.is_released = true;
}

static bool update_may_queue(struct lh_engine *engine, struct lh_unit *unit)
{
    (void)engine;
    return !unit->parts->defer.is_deferred || unit->parts->defer.is_released;
}

static bool update_is_deferred(const struct lh_engine *engine, const struct lh_unit *unit)
{
    (void)engine;
    return unit->parts->defer.is_deferred;
}

/* If a thread waits for the end of the closed step, queue all remaining updates. */
static bool message(struct lh_engine *engine, const struct lh_ring_message *message)
{
    if (message->words[0] != LH_MESSAGE_DRAIN)
        return false;
    if (engine->step_state == LH_STEP_STATE_CLOSED)
        drain(engine);
    return true;
}

int lh_defer_create(struct lh_engine *engine, struct lh_error *err)
{
    uint32_t count = engine->opts.unit_count;
    LH_TRY(LH_ENGINE_PART_CREATE(engine, defer, err));
    engine->defer->order = lh_alloc_zeroed(engine->alloc, count, sizeof(uint32_t));
    if (!engine->defer->order)
        return lh_error_set(err, -ENOMEM, "no memory for %u deferred updates", count);
    for (uint32_t i = 0; i < count; i++)
        lh_defer_set(&engine->units[i], true);
    return 0;
}

void lh_defer_destroy(struct lh_engine *engine)
{
    if (engine->defer)
        lh_free(engine->alloc, engine->defer->order);
}

const struct lh_feature lh_defer_feature = {
    .name = "defer",
    .message = message,
    .use_begun = lh_defer_approach,
    .update_may_queue = update_may_queue,
    .update_is_deferred = update_is_deferred,
    .step_closed = step_closed,
    .step_over = step_over,
};
