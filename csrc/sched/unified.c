#include "sched/unified.h"

#include "sched/engine_private.h"

static void marker_done(struct lh_engine *engine, struct lh_copy *marker)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, marker->unit);
    LH_ASSERT(unit->copy.is_release_awaited);
    unit->copy.is_release_awaited = false;
}

/* Let the engine be woken when the unit's last reader has been executed. */
static void marker_submit(struct lh_engine *engine, struct lh_unit *unit)
{
    /* Without a free one, the end of a copy in flight wakes the engine, and this is tried again. */
    if (!lh_copy_is_free(engine, LH_COPY_USER_UNIT))
        return;
    struct lh_copy *marker = lh_copy_take(engine, LH_COPY_USER_UNIT);
    marker->done = marker_done;
    marker->what = "the end of a unit's use";
    marker->unit = (uint32_t)(unit - engine->units);
    marker->dev = (struct lh_dev_copy){
        .direction = LH_DEV_DIRECTION_IN,
        .after = unit->copy.released,
    };
    unit->copy.is_release_awaited = lh_copy_submit(engine, marker);
    engine->unified->is_any_new = true;
}

static bool unit_is_unread(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(lh_unit_pins(unit) == 0);
    if (atomic_load(&engine->failed))
        return true; /* the device may be lost, and the bytes are not used any more */
    if (unit->copy.is_release_awaited)
        return false;
    if (engine->dev->ops->has_passed(engine->dev, unit->copy.released))
        return true;
    marker_submit(engine, unit);
    return false;
}

static bool pump_after(struct lh_engine *engine)
{
    bool is_any_new = engine->unified->is_any_new;
    engine->unified->is_any_new = false;
    return is_any_new;
}

const struct lh_feature lh_unified_feature = {
    .name = "unified",
    .unit_is_unread = unit_is_unread,
    .wait_begun = lh_stream_gap_begin,
    .wait_ended = lh_stream_gap_end,
    .stats_correct = lh_stream_stats_correct,
    .pump_after = pump_after,
};
