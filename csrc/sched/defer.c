/*
 * Deferred updates: which units wait for the step's close, and how they follow one another then.
 *
 * A deferred update is due when the next forward reads its unit. At close the units are lined up in
 * the order in which this step's forward began with them, and each joins the queue of updates when
 * forward comes near:
 *
 *      forward begins unit       0     1     2     3
 *      updates that were queued  0 1 2 | 3   | 4   | 5 ...
 *                                at close
 *
 * The distance is a number of bytes of parameters, so that what an update has brought into the
 * region is still there when forward reads it; and it depends on the order of uses alone, never on
 * time, so that the residency plan knows it. Whoever waits for the step's end (the next gradient, a
 * flush, a commit) queues what is left.
 *
 * Source: LoHan IV-C gives the eager half (active gradient offloading); the other half is that an
 * update need only be over before the next forward.
 */
#include "sched/engine_private.h"

static bool is_awaited(const struct lh_unit *unit)
{
    return unit->is_deferred && unit->gradient_count > 0;
}

/* Units of the closed step in the order of their first use; those never used come last. */
static void line_up(struct lh_engine *engine)
{
    const struct lh_event_list *list = &engine->recording;

    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        engine->units[i].deferred_at = LH_CHUNK_NONE;
    engine->deferred_count = 0;
    engine->deferred_first = 0;
    for (uint64_t i = 0; i < list->count + engine->opts.unit_count; i++) {
        bool is_listed = i < list->count;
        uint32_t index = is_listed ? list->events[i].unit : (uint32_t)(i - list->count);
        struct lh_unit *unit = &engine->units[index];

        if (!is_awaited(unit) || unit->deferred_at != LH_CHUNK_NONE)
            continue;
        if (is_listed && list->events[i].kind != LH_RESIDENCY_EVENT_BEGIN)
            continue;
        unit->deferred_at = engine->deferred_count;
        engine->deferred[engine->deferred_count++] = index;
    }
}

static void release_first(struct lh_engine *engine)
{
    uint32_t index = engine->deferred[engine->deferred_first++];

    engine->units[index].is_released = true;
    lh_update_consider(engine, index);
}

/* Queue the units before position, and those behind it that are near. */
static void release_near(struct lh_engine *engine, uint32_t position)
{
    const uint64_t near_bytes = engine->budget.region_bytes / 2;
    uint64_t ahead_bytes = 0;

    while (engine->deferred_first < lh_min_u64(position, engine->deferred_count))
        release_first(engine);
    for (uint32_t i = position; i < engine->deferred_count; i++) {
        ahead_bytes += engine->units[engine->deferred[i]].desc.bytes;
        if (ahead_bytes > near_bytes && i > position + 1)
            break;
        if (i == engine->deferred_first)
            release_first(engine);
    }
}

void lh_defer_close(struct lh_engine *engine)
{
    line_up(engine);
    lh_step_stats(engine, engine->step)->deferred_units = engine->deferred_count;
    if (engine->opts.schedule == LH_ENGINE_SCHEDULE_SERIAL)
        lh_defer_drain(engine);
    else
        release_near(engine, 0);
}

void lh_defer_use(struct lh_engine *engine, uint32_t index)
{
    const struct lh_unit *unit = &engine->units[index];

    if (engine->deferred_first == engine->deferred_count)
        return;
    if (is_awaited(unit) && unit->deferred_at != LH_CHUNK_NONE)
        release_near(engine, unit->deferred_at + 1);
}

void lh_defer_drain(struct lh_engine *engine)
{
    while (engine->deferred_first < engine->deferred_count)
        release_first(engine);
}

void lh_defer_step_over(struct lh_engine *engine)
{
    LH_ASSERT(engine->deferred_first == engine->deferred_count);
    engine->deferred_first = 0;
    engine->deferred_count = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        engine->units[i].is_released = false;
}
