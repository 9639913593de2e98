/*
 * Plans of which units a region contains at which time. Main memory has a region, and so has an
 * accelerator that reads copies.
 *
 * The order of uses is recorded in each cycle (a training step's forward and backward, or an
 * evaluation), and the next cycle is planned with it (plan/residency.h). Uses happen in the memory
 * where computation is. With an accelerator that reads copies this is the accelerator's region;
 * main memory is then read only by the copies that the accelerator's plan starts and by updates.
 * Main memory's plan has them in the order in which uses will need them, whenever they are actually
 * made. So main memory's plan is derived from the accelerator's plan, and is replanned with it:
 *
 *      uses      begin a   begin b   end b   update b   begin a ...
 *      device    load a    load b                           load b (again)
 *      host      a: begin, end   b: begin, end   b: update  b: begin, end
 *
 * An update makes the accelerator's copy stale. The units that the next forward reads first are
 * copied again as soon as they are updated, during backward and not when a thread waits for them.
 */
#include <inttypes.h>
#include <string.h>

#include "sched/engine_private.h"

/*
 * The maximum number of recorded events of a cycle, per unit. Forward, backward and an update take
 * five; the rest is for shared modules.
 */
#define EVENTS_PER_UNIT 16
#define EVENTS_MIN 4096

static bool is_device(const struct lh_engine *engine, const struct lh_region *region)
{
    return region == engine->device_region;
}

/* Record an event of this cycle; the recording predicts the next cycle. */
static void event_record(struct lh_engine *engine, struct lh_residency_event event)
{
    struct lh_event_list *list = &engine->recording;
    /* The next cycle has the updates where this one had them the first time. */
    bool is_again = engine->is_repeated && event.kind == LH_RESIDENCY_EVENT_UPDATE;
    if (engine->units[event.unit].desc->is_announced || is_again)
        return;
    if (list->count == engine->event_max) {
        list->overflowed = true; /* a cycle that is too long to be recorded is not predicted */
        return;
    }
    list->events[list->count++] = event;
}

/* Plan loads, after the last event of this cycle, of the units that the next cycle reads first. */
static int64_t ahead_plan(struct lh_engine *engine, struct lh_region *region,
                          struct lh_residency_op *ops, uint64_t op_max, uint64_t *loaded)
{
    const struct lh_event_list *next = &engine->recorded[engine->mode];
    uint64_t bytes = 0;
    int64_t added = lh_residency_plan_ahead(&region->plan, next->events, next->count, ops, op_max,
                                            &bytes, &region->error);
    LH_ASSERT(added >= 0);
    for (int64_t i = 0; i < added; i++)
        ops[i].event = region->predicted.count;
    *loaded += bytes;
    return added;
}

/* Append ops for all of the prediction, or for as much of it as can be planned now. */
static void region_extend(struct lh_engine *engine, struct lh_region *region)
{
    uint64_t count = region->predicted.count;
    LH_ASSERT(region->op_first <= region->op_count && region->op_count <= region->op_max);
    struct lh_residency_op *ops = region->ops + region->op_count;
    uint64_t op_max = region->op_max - region->op_count;
    uint64_t loaded = 0;
    uint64_t failed_at = 0;
    lh_residency_copy(&region->before, &region->plan);
    int64_t added =
        lh_residency_plan_apart(&region->plan, &region->before, region->predicted.events, count,
                                true, ops, op_max, &loaded, &failed_at, &region->error);
    while (added == -ENOSPC) {
        /*
         * Units in use block event failed_at: plan only the events before it now, and the rest when
         * it happens. Planning fewer events may lead to other choices, and to an earlier failure.
         */
        LH_ASSERT(failed_at < count);
        count = failed_at;
        lh_residency_copy(&region->plan, &region->before);
        added = lh_residency_plan(&region->plan, region->predicted.events, count, true, ops, op_max,
                                  &loaded, &failed_at, NULL);
    }
    LH_ASSERT(added >= 0); /* op_max allows a load and its evictions for every event */
    if (count == region->predicted.count && is_device(engine, region))
        added += ahead_plan(engine, region, ops + added, op_max - (uint64_t)added, &loaded);
    for (int64_t i = 0; i < added; i++)
        region->op_steps[region->op_count + (uint64_t)i] = engine->plan_step;
    region->op_count += (uint64_t)added;
    region->planned_until = count;
    lh_core_stats(engine, engine->plan_step)->planned_bytes[region->link] += loaded;
}

/* Copy a unit's actual state in the region into the plan. */
static void region_look(struct lh_engine *engine, struct lh_region *region, uint32_t index)
{
    const struct lh_unit *unit = &engine->units[index];
    struct lh_residency *plan = &region->plan;
    bool is_here = unit->state != LH_UNIT_STATE_ABSENT;
    uint64_t offset = unit->offset;
    plan->use_counts[index] = unit->use_count;
    bool is_lent = LH_FEATURE_ANY(engine, unit_is_lent, unit);
    is_lent &= !is_device(engine, region); /* a unit is lent where it is in main memory */
    plan->open_uses[index] = unit->use_is_open || is_lent ? 1 : 0;
    if (is_device(engine, region)) {
        is_here = lh_unit_copy_is_placed(&unit->copy);
        offset = unit->copy.offset;
        plan->use_counts[index] = unit->copy.use_count;
    } else if (engine->copies_units) {
        plan->open_uses[index] = unit->copy.is_copying || is_lent ? 1 : 0;
    }
    plan->is_stale[index] = is_device(engine, region) && is_here && unit->copy.is_stale;
    if (is_here)
        lh_residency_put(plan, index, offset);
}

/* The bytes that move when a unit is loaded into the region. */
static uint64_t load_bytes(const struct lh_engine *engine, const struct lh_region *region,
                           uint32_t index)
{
    const struct lh_unit *unit = &engine->units[index];
    return unit->desc->bytes - (is_device(engine, region) ? 0 : lh_unit_load_first(unit));
}

/* Discard the ops not yet executed, and reset the plan's state to what is in the region now. */
static void region_reset(struct lh_engine *engine, struct lh_region *region)
{
    for (uint64_t i = region->op_first; i < region->op_count; i++) {
        if (region->ops[i].kind == LH_RESIDENCY_OP_LOAD)
            lh_core_stats(engine, region->op_steps[i])->planned_bytes[region->link] -=
                load_bytes(engine, region, region->ops[i].unit);
    }
    region->op_first = 0;
    region->op_count = 0;
    lh_residency_reset(&region->plan);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        region_look(engine, region, i);
}

void lh_region_unread(struct lh_engine *engine, uint32_t unit)
{
    struct lh_region *region = &engine->host_region;
    for (uint64_t i = region->op_first; i < region->op_count; i++) {
        if (region->ops[i].kind == LH_RESIDENCY_OP_LOAD && region->ops[i].unit == unit)
            lh_core_stats(engine, region->op_steps[i])->planned_bytes[region->link] -=
                load_bytes(engine, region, unit);
    }
    region->units[unit].unread_bytes = region->units[unit].bytes;
}

/* Let the last closed step's ops that are not yet executed count for engine->plan_step. */
static void region_step_end(struct lh_engine *engine, struct lh_region *region)
{
    for (uint64_t i = region->op_first; i < region->op_count; i++) {
        if (region->op_steps[i] != engine->step)
            continue;
        if (region->ops[i].kind == LH_RESIDENCY_OP_LOAD) {
            uint64_t bytes = load_bytes(engine, region, region->ops[i].unit);
            lh_core_stats(engine, engine->step)->planned_bytes[region->link] -= bytes;
            lh_core_stats(engine, engine->plan_step)->planned_bytes[region->link] += bytes;
        }
        region->op_steps[i] = engine->plan_step;
    }
}

/*
 * The last closed step has moved all its bytes except its commit's. Loads of its plan that are not
 * yet executed, and uses before the next step begins, count for the next step if it has begun,
 * otherwise for no step.
 */
void lh_region_step_end(struct lh_engine *engine)
{
    LH_ASSERT(engine->step_state == LH_STEP_STATE_CLOSED);
    if (engine->plan_step == engine->step)
        engine->plan_step = 0;
    region_step_end(engine, &engine->host_region);
    if (engine->copies_units)
        region_step_end(engine, engine->device_region);
}

/* Whether the unit must still be brought into the region for a use that is already counted. */
static bool is_owed(const struct lh_engine *engine, const struct lh_region *region,
                    const struct lh_unit *unit)
{
    bool is_awaited = region == engine->uses && unit->waiter_count > 0;
    if (is_device(engine, region))
        return is_awaited && (!lh_unit_copy_is_placed(&unit->copy) || unit->copy.is_stale);
    if (unit->state != LH_UNIT_STATE_ABSENT)
        return false;
    is_awaited |= LH_FEATURE_ANY(engine, unit_is_wanted, unit);
    return is_awaited || (unit->update.is_queued && !unit->update.is_done);
}

static uint64_t owed_put(const struct lh_engine *engine, struct lh_region *region)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        if (is_owed(engine, region, &engine->units[i]))
            region->predicted.events[count++] =
                (struct lh_residency_event){i, LH_RESIDENCY_EVENT_NEED};
    }
    return count;
}

/* In evaluations: read the next units while the current one computes (plan/residency.h). */
static void read_ahead(const struct lh_engine *engine, struct lh_region *region)
{
    struct lh_residency_trial trial = {
        .state = &region->before,
        .events = region->moved,
        .ops = region->ops + region->op_count,
        .op_max = region->op_max - region->op_count,
    };
    if (engine->mode == LH_ENGINE_MODE_EVAL)
        lh_residency_read_ahead_where_cheap(&region->plan, region->predicted.events,
                                            region->predicted.count, &trial);
}

static void event_put(struct lh_event_list *list, uint32_t unit, enum lh_residency_event_kind kind)
{
    list->events[list->count++] = (struct lh_residency_event){unit, (uint32_t)kind};
}

/*
 * Derive main memory's events, in order: what the accelerator's ops and future updates read in main
 * memory, preceded by the current event (may be NULL) if it is an update.
 */
static void host_derive(struct lh_engine *engine, const struct lh_residency_event *event)
{
    const struct lh_region *device = engine->device_region;
    struct lh_event_list *list = &engine->host_region.predicted;
    uint64_t op = device->op_first;
    list->count = owed_put(engine, &engine->host_region);
    if (event && event->kind == LH_RESIDENCY_EVENT_UPDATE)
        event_put(list, event->unit, LH_RESIDENCY_EVENT_UPDATE);
    for (uint64_t i = 0; i <= device->planned_until; i++) {
        /* After the last event, take all remaining ops. */
        bool is_end = i == device->planned_until;
        for (; op < device->op_count && (is_end || device->ops[op].event <= i); op++) {
            if (device->ops[op].kind != LH_RESIDENCY_OP_LOAD)
                continue;
            event_put(list, device->ops[op].unit, LH_RESIDENCY_EVENT_BEGIN);
            event_put(list, device->ops[op].unit, LH_RESIDENCY_EVENT_END);
        }
        if (!is_end && i >= device->position &&
            device->predicted.events[i].kind == LH_RESIDENCY_EVENT_UPDATE)
            event_put(list, device->predicted.events[i].unit, LH_RESIDENCY_EVENT_UPDATE);
    }
    region_reset(engine, &engine->host_region);
    /* A wrong guess is replanned at each use, so do not spend time on trying other orders. */
    if (!event || !engine->uses->is_guess)
        read_ahead(engine, &engine->host_region);
    region_extend(engine, &engine->host_region);
}

static void uses_extend(struct lh_engine *engine, const struct lh_residency_event *event)
{
    region_extend(engine, engine->uses);
    if (engine->copies_units)
        host_derive(engine, event);
}

/*
 * Replan from what is in memory: first the owed uses, then event (may be NULL), then the prediction
 * from tail_from on.
 */
static void replan(struct lh_engine *engine, const struct lh_residency_event *event,
                   uint64_t tail_from)
{
    struct lh_region *region = engine->uses;
    struct lh_event_list *predicted = &region->predicted;
    uint64_t owed_count = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        owed_count += is_owed(engine, region, &engine->units[i]);
    uint64_t head = owed_count + (event ? 1 : 0);
    LH_ASSERT(tail_from <= predicted->count && head <= engine->event_max);
    uint64_t tail = lh_min_u64(predicted->count - tail_from, engine->event_max - head);
    memmove(predicted->events + head, predicted->events + tail_from,
            tail * sizeof(*predicted->events));
    predicted->count = owed_put(engine, region);
    LH_ASSERT(predicted->count == owed_count);
    if (event)
        predicted->events[predicted->count++] = *event;
    predicted->count += tail;
    region->position = head;
    region_reset(engine, region);
    uses_extend(engine, event);
}

static void use_count(struct lh_engine *engine, uint32_t index, enum lh_residency_event_kind kind)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    if (!engine->copies_units) {
        unit->use_count++;
        return;
    }
    unit->copy.use_count++;
    if (kind == LH_RESIDENCY_EVENT_UPDATE)
        unit->use_count++; /* an update also uses main memory; copies are counted when they begin */
}

void lh_region_event(struct lh_engine *engine, uint32_t index, enum lh_residency_event_kind kind)
{
    struct lh_residency_event event = {index, (uint32_t)kind};
    struct lh_region *region = engine->uses;
    LH_ASSERT(index < engine->opts.unit_count);
    event_record(engine, event);
    if (kind == LH_RESIDENCY_EVENT_END)
        return;
    const struct lh_event_list *predicted = &region->predicted;
    uint64_t at = lh_expect_next(region);
    bool is_expected = at < predicted->count && predicted->events[at].unit == index &&
                       predicted->events[at].kind == (uint32_t)kind;
    if (is_expected)
        region->has_extra = false;
    if (is_expected && at < region->planned_until) {
        region->position = at + 1;
    } else {
        /* The plan ended before this use, or did not predict it here: replan from here. */
        uint64_t tail_from = is_expected ? at + 1 : lh_expect_tail(engine, &event);
        bool is_known =
            kind == LH_RESIDENCY_EVENT_UPDATE && engine->units[index].desc->is_announced;
        if (!is_expected && !is_known)
            lh_core_stats(engine, engine->plan_step)->replans++;
        replan(engine, &event, tail_from);
    }
    use_count(engine, index, kind);
}

void lh_region_cycle_end(struct lh_engine *engine)
{
    /*
     * A training cycle that was not closed (an exception, a forward without a step) predicts
     * nothing.
     */
    bool is_whole = engine->mode == LH_ENGINE_MODE_EVAL || engine->plan_step <= engine->step;
    if (engine->recording.count > 0 && !engine->recording.overflowed && is_whole) {
        struct lh_event_list old = engine->recorded[engine->mode];
        engine->recorded[engine->mode] = engine->recording;
        engine->recording = old;
    }
    engine->recording.count = 0;
    engine->recording.overflowed = false;
}

static void region_forget(struct lh_engine *engine, struct lh_region *region)
{
    region->predicted.count = 0;
    region->position = 0;
    region->planned_until = 0;
    region_reset(engine, region);
}

void lh_region_discard(struct lh_engine *engine)
{
    region_forget(engine, &engine->host_region);
    if (engine->copies_units)
        region_forget(engine, engine->device_region);
}

void lh_region_forget(struct lh_engine *engine)
{
    engine->recording.count = 0;
    lh_region_discard(engine);
}

void lh_region_begin(struct lh_engine *engine, enum lh_engine_mode mode)
{
    struct lh_region *region = engine->uses;
    bool is_whole = lh_expect_next(region) == region->predicted.count &&
                    region->planned_until == region->predicted.count;
    lh_region_cycle_end(engine);
    engine->mode = mode;
    engine->plan_step = mode == LH_ENGINE_MODE_TRAIN ? engine->step + 1 : 0;
    const struct lh_event_list *known = &engine->recorded[mode];
    LH_ASSERT(known->count <= engine->event_max);
    region->position = 0;
    region->has_extra = false;
    region->is_guess = known->count == 0;
    if (known->count > 0) {
        memcpy(region->predicted.events, known->events, known->count * sizeof(*known->events));
        region->predicted.count = known->count;
    } else {
        lh_expect_first(engine, &region->predicted);
    }
    if (!is_whole) {
        region_reset(engine, region);
        read_ahead(engine, region);
        replan(engine, NULL, 0);
        return;
    }
    /* The previous cycle went as planned: append this plan to the ops not yet executed. */
    uint64_t waiting = 0;
    for (uint64_t i = region->op_first; i < region->op_count; i++) {
        if (region->ops[i].kind == LH_RESIDENCY_OP_NONE)
            continue;
        region->op_steps[waiting] = region->op_steps[i];
        region->ops[waiting] = region->ops[i];
        region->ops[waiting++].event = 0;
    }
    region->op_first = 0;
    region->op_count = waiting;
    read_ahead(engine, region);
    uses_extend(engine, NULL);
}

void lh_region_announced(struct lh_engine *engine, uint32_t unit, uint64_t place, bool is_last)
{
    LH_ASSERT(unit < engine->opts.unit_count);
    lh_expect_insert(engine, unit, place == 0);
    if (is_last)
        replan(engine, NULL, engine->uses->position);
}

/*
 * Nothing moves and a thread waits: an eviction in the plan waits for a use that lasts longer than
 * in the previous step (a view that lives longer). Replan around the units in use.
 */
void lh_region_plan_around(struct lh_engine *engine)
{
    lh_core_stats(engine, engine->plan_step)->replans++;
    replan(engine, NULL, engine->uses->position);
}

void lh_region_plan_host(struct lh_engine *engine)
{
    LH_ASSERT(engine->copies_units);
    host_derive(engine, NULL);
}

/*
 * Plan a use that has begun, or a copy, that could not be planned before. Returns whether more is
 * planned now.
 */
bool lh_region_catch_up(struct lh_engine *engine)
{
    struct lh_region *region = engine->uses;
    if (region->planned_until < region->position) {
        replan(engine, NULL, region->position);
        return region->planned_until >= region->position;
    }
    struct lh_region *host = &engine->host_region;
    if (!engine->copies_units || host->planned_until == host->predicted.count ||
        host->op_first < host->op_count)
        return false;
    uint64_t before = host->planned_until;
    host_derive(engine, NULL);
    return host->planned_until > before || host->op_count > 0;
}

static int region_create(struct lh_engine *engine, struct lh_region *region, uint64_t bytes,
                         struct lh_error *err)
{
    struct lh_alloc *alloc = engine->alloc;
    uint32_t units = engine->opts.unit_count;
    /*
     * The maximum number of ops: one load per event and one per unit after them, each with
     * evictions of what earlier loads put there; and as many ops of the previous plan, not yet
     * executed.
     */
    region->op_max = 2 * (2 * (engine->event_max + units) + units);
    /* Main memory's events are at most two for each of the accelerator's ops, and the updates. */
    uint64_t event_max =
        engine->event_max + (engine->copies_units ? 2 * region->op_max + units : 0);
    if (engine->copies_units && !is_device(engine, region))
        region->op_max = 2 * (2 * event_max + units);
    region->predicted.events = lh_alloc_zeroed(alloc, event_max, sizeof(struct lh_residency_event));
    region->moved = lh_alloc_zeroed(alloc, event_max, sizeof(struct lh_residency_event));
    region->ops = lh_alloc_zeroed(alloc, region->op_max, sizeof(*region->ops));
    region->op_steps = lh_alloc_zeroed(alloc, region->op_max, sizeof(*region->op_steps));
    region->units = lh_alloc_zeroed(alloc, units, sizeof(*region->units));
    if (!region->predicted.events || !region->moved || !region->ops || !region->op_steps ||
        !region->units)
        return lh_error_set(err, -ENOMEM, "no memory for a plan of %" PRIu64 " events", event_max);
    for (uint32_t i = 0; i < units; i++) {
        const struct lh_engine_unit *desc = engine->units[i].desc;
        bool is_served = engine->copies_units && !is_device(engine, region);
        uint64_t unit_bytes = is_served ? desc->bytes : desc->place_bytes;
        region->units[i] = (struct lh_residency_unit){
            .bytes = unit_bytes,
            .unread_bytes = unit_bytes - load_bytes(engine, region, i),
            .always = desc->always && !is_served,
        };
    }
    LH_TRY(lh_residency_init(&region->plan, alloc, region->units, units, bytes, err));
    region->plan.has_copies = is_device(engine, region);
    LH_TRY(lh_residency_init(&region->before, alloc, region->units, units, bytes, err));
    region->before.has_copies = is_device(engine, region);
    return 0;
}

int lh_region_create_all(struct lh_engine *engine, struct lh_error *err)
{
    struct lh_event_list *lists[] = {&engine->recorded[0], &engine->recorded[1],
                                     &engine->recording};
    engine->event_max = lh_max_u64(EVENTS_MIN, (uint64_t)engine->opts.unit_count * EVENTS_PER_UNIT);
    for (size_t i = 0; i < LH_COUNT_OF(lists); i++) {
        lists[i]->events =
            lh_alloc_zeroed(engine->alloc, engine->event_max, sizeof(struct lh_residency_event));
        if (!lists[i]->events)
            return lh_error_set(err, -ENOMEM, "no memory for %" PRIu64 " events",
                                engine->event_max);
    }
    engine->host_region.link =
        lh_engine_is_mate(engine) ? LH_ENGINE_LINK_SHARED : LH_ENGINE_LINK_PARAM_READ;
    if (engine->copies_units) {
        LH_TRY(LH_ENGINE_PART_CREATE(engine, device_region, err));
        engine->device_region->link = LH_ENGINE_LINK_COPY_IN;
    }
    engine->uses = engine->copies_units ? engine->device_region : &engine->host_region;
    LH_TRY(region_create(engine, &engine->host_region, engine->budget.region_bytes, err));
    if (!engine->copies_units)
        return 0;
    return region_create(engine, engine->device_region, engine->opts.device_bytes, err);
}

static void region_destroy(struct lh_engine *engine, struct lh_region *region)
{
    void *const tables[] = {region->predicted.events, region->moved, region->ops, region->op_steps};
    for (size_t i = 0; i < LH_COUNT_OF(tables); i++)
        lh_free(engine->alloc, tables[i]);
    if (region->plan.units)
        lh_residency_deinit(&region->plan, engine->alloc);
    if (region->before.units)
        lh_residency_deinit(&region->before, engine->alloc);
    lh_free(engine->alloc, region->units);
}

void lh_region_destroy_all(struct lh_engine *engine)
{
    lh_free(engine->alloc, engine->recorded[0].events);
    lh_free(engine->alloc, engine->recorded[1].events);
    lh_free(engine->alloc, engine->recording.events);
    region_destroy(engine, &engine->host_region);
    if (engine->device_region)
        region_destroy(engine, engine->device_region);
    lh_free(engine->alloc, engine->device_region);
}
