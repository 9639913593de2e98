/*
 * Uses that are predicted without a recording: [Note: Uses that are announced] in expect.h; and
 * what is left of a prediction after a use that it did not contain.
 */
#include <string.h>

#include "sched/engine_private.h"

/* A use that is farther ahead of its place in a recorded order is considered an additional one. */
#define OMITTED_EVENTS_MAX 8

/* Whether the unit's update follows its next use: autograd has saved it, so this is backward. */
static bool is_updated_after(const struct lh_engine *engine, const struct lh_unit *unit)
{
    bool is_deferred = LH_FEATURE_ANY(engine, update_is_deferred, unit);
    return unit->desc->elements > 0 && !is_deferred && atomic_load(&unit->shared.handles) > 0;
}

void lh_expect_insert(struct lh_engine *engine, uint32_t unit, bool is_first)
{
    struct lh_region *region = engine->uses;
    struct lh_event_list *list = &region->predicted;
    if (is_first)
        engine->announced_count = 0;
    uint64_t at = region->position + engine->announced_count;
    uint64_t count = is_updated_after(engine, &engine->units[unit]) ? 3 : 2;
    LH_ASSERT(region->position <= list->count && engine->units[unit].desc->is_announced);
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

uint64_t lh_expect_next(const struct lh_region *region)
{
    uint64_t at = region->position;
    LH_ASSERT(at <= region->predicted.count);
    while (at < region->predicted.count &&
           region->predicted.events[at].kind == LH_RESIDENCY_EVENT_END)
        at++;
    return at;
}

bool lh_expect_is_next(const struct lh_engine *engine)
{
    const struct lh_region *region = engine->uses;
    uint64_t at = lh_expect_next(region);
    return at < region->predicted.count &&
           engine->units[region->predicted.events[at].unit].desc->is_announced;
}

static uint64_t foreseen(const struct lh_event_list *list, uint64_t from, uint32_t unit,
                         enum lh_residency_event_kind kind)
{
    while (from < list->count &&
           (list->events[from].unit != unit || list->events[from].kind != (uint32_t)kind))
        from++;
    return from;
}

static void event_move(struct lh_event_list *list, uint64_t from, uint64_t to)
{
    LH_ASSERT(to <= from && from < list->count);
    struct lh_residency_event event = list->events[from];
    memmove(list->events + to + 1, list->events + to, (from - to) * sizeof(event));
    list->events[to] = event;
}

/* Remove the unit's events from [from, *end), and reduce *end accordingly. */
static void events_drop(struct lh_event_list *list, uint64_t from, uint64_t *end, uint32_t unit)
{
    for (uint64_t i = *end; i-- > from;) {
        if (list->events[i].unit != unit)
            continue;
        list->count--;
        memmove(list->events + i, list->events + i + 1, (list->count - i) * sizeof(*list->events));
        --*end;
    }
}

/*
 * Whether an event of a recorded cycle, whose next place in it is `at`, happens in addition to the
 * recorded ones. If its place is far ahead, this is assumed once.
 */
static bool is_extra(struct lh_region *region, uint64_t at)
{
    region->has_extra = !region->has_extra && at - region->position > OMITTED_EVENTS_MAX;
    return region->has_extra;
}

uint64_t lh_expect_tail(const struct lh_engine *engine, const struct lh_residency_event *event)
{
    struct lh_region *region = engine->uses;
    struct lh_event_list *list = &region->predicted;
    uint64_t at = foreseen(list, region->position, event->unit, event->kind);
    if (at == list->count)
        return region->position;
    bool is_update = event->kind == LH_RESIDENCY_EVENT_UPDATE;
    if (!region->is_guess && !(is_update && lh_expect_is_next(engine)))
        return is_extra(region, at) ? region->position : at + 1;
    if (is_update)
        events_drop(list, region->position, &at, event->unit);
    uint64_t end = foreseen(list, at, event->unit, LH_RESIDENCY_EVENT_END);
    event_move(list, at, region->position);
    if (end < list->count && event->kind == LH_RESIDENCY_EVENT_BEGIN)
        event_move(list, end, region->position + 1);
    return region->position + 1;
}

void lh_expect_first(struct lh_engine *engine, struct lh_event_list *list)
{
    list->count = 0;
    uint32_t count = engine->opts.unit_count;
    for (uint32_t i = 0; i < count; i++) {
        if (engine->units[i].desc->is_announced)
            continue;
        list->events[list->count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_BEGIN};
        list->events[list->count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_END};
    }
    for (uint32_t i = count; engine->mode == LH_ENGINE_MODE_TRAIN && i-- > 0;) {
        if (engine->units[i].desc->is_announced)
            continue;
        list->events[list->count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_BEGIN};
        list->events[list->count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_END};
        bool is_updated = engine->units[i].desc->elements > 0 && !lh_engine_is_mate(engine);
        if (is_updated)
            list->events[list->count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_UPDATE};
    }
}
