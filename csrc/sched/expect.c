/* Uses that are predicted without a recording: [Note: Uses that are announced] in expect.h. */
#include <string.h>

#include "sched/engine_private.h"

/* Whether the unit's update follows its next use: autograd has saved it, so this is backward. */
static bool is_updated_after(const struct lh_unit *unit)
{
    return unit->desc.elements > 0 && !unit->defer.is_deferred &&
           atomic_load(&unit->shared.handles) > 0;
}

void lh_expect_insert(struct lh_engine *engine, uint32_t unit, bool is_first)
{
    struct lh_region *region = engine->uses;
    struct lh_event_list *list = &region->predicted;
    if (is_first)
        engine->announced_count = 0;
    uint64_t at = region->position + engine->announced_count;
    uint64_t count = is_updated_after(&engine->units[unit]) ? 3 : 2;
    LH_ASSERT(region->position <= list->count && engine->units[unit].desc.is_announced);
    if (list->count + count > engine->event_max || at > list->count)
        return;
    struct lh_residency_event *events = list->events + at;
    memmove(events + count, events, (list->count - at) * sizeof(*events));
    events[0] = (struct lh_residency_event){unit, LH_RESIDENCY_EVENT_BEGIN};
    events[1] = (struct lh_residency_event){unit, LH_RESIDENCY_EVENT_END};
    if (count == 3)
        events[2] = (struct lh_residency_event){unit, LH_RESIDENCY_EVENT_UPDATE};
    list->count += count;
    engine->announced_count += count;
}

bool lh_expect_is_next(const struct lh_engine *engine)
{
    const struct lh_region *region = engine->uses;
    uint64_t at = region->position;
    LH_ASSERT(at <= region->predicted.count);
    while (at < region->predicted.count &&
           region->predicted.events[at].kind == LH_RESIDENCY_EVENT_END)
        at++;
    return at < region->predicted.count &&
           engine->units[region->predicted.events[at].unit].desc.is_announced;
}

void lh_expect_first(struct lh_engine *engine, struct lh_event_list *list)
{
    list->count = 0;
    uint32_t count = engine->opts.unit_count;
    for (uint32_t i = 0; i < count; i++) {
        if (engine->units[i].desc.is_announced)
            continue;
        list->events[list->count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_BEGIN};
        list->events[list->count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_END};
    }
    for (uint32_t i = count; engine->mode == LH_ENGINE_MODE_TRAIN && i-- > 0;) {
        if (engine->units[i].desc.is_announced)
            continue;
        list->events[list->count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_BEGIN};
        list->events[list->count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_END};
        bool is_updated = engine->units[i].desc.elements > 0 && !lh_borrow_is_on(engine);
        if (is_updated)
            list->events[list->count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_UPDATE};
    }
}
