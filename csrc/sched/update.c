#include "sched/update.h"

#include "sched/engine_private.h"

void lh_update_consider(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    if (unit->update.gradient_count == 0 || unit->update.is_queued)
        return;
    LH_ASSERT(unit->desc->elements > 0);
    LH_ASSERT(unit->update.gradient_count <= unit->desc->param_count);
    bool is_closed = engine->step_state == LH_STEP_STATE_CLOSED;
    if (!is_closed && engine->step_state != LH_STEP_STATE_OPEN)
        return;
    LH_FEATURE_CALL(engine, update_considered, unit);
    bool is_complete = unit->update.gradient_count == unit->desc->param_count &&
                       atomic_load(&unit->shared.handles) == 0;
    /* After the close only pins count: the message that the last lend was freed may be pending. */
    bool is_used = lh_unit_pins(unit) > 0 || (!is_closed && unit->use_is_open);
    if ((!is_closed && !is_complete) || is_used)
        return;
    bool may_queue = LH_FEATURE_ALL(engine, update_may_queue, unit);
    if (!may_queue)
        return;
    lh_region_event(engine, index, LH_RESIDENCY_EVENT_UPDATE);
    unit->update.is_queued = true;
    LH_ASSERT(engine->updates.count < engine->opts.unit_count);
    engine->updates.queue[engine->updates.count++] = index;
    lh_gradient_hold_unit(engine, unit);
}

int lh_update_create(struct lh_engine *engine, struct lh_error *err)
{
    uint32_t count = engine->opts.unit_count;
    engine->updates.queue = lh_alloc_zeroed(engine->alloc, count, sizeof(uint32_t));
    engine->updates.predicted = lh_alloc_zeroed(engine->alloc, count, sizeof(uint32_t));
    if (!engine->updates.queue || !engine->updates.predicted)
        return lh_error_set(err, -ENOMEM, "no memory for the updates of %u units", count);
    for (uint32_t i = 0; i < count; i++) {
        const struct lh_engine_unit *desc = engine->units[i].desc;
        engine->updates.has_announced |= desc->elements > 0 && desc->is_announced;
        engine->units[i].update.is_predicted = desc->elements > 0 && !desc->is_announced;
    }
    return 0;
}

void lh_update_destroy(struct lh_engine *engine)
{
    lh_free(engine->alloc, engine->updates.queue);
    lh_free(engine->alloc, engine->updates.predicted);
}
