/*
 * A mate's side of a team (team/team.h): its units are not read from files, but pinned in the
 * owner's region.
 *
 * The mate's own plan decides when it borrows a unit and when it gives the unit back: LOADING
 * lasts until the owner has the unit, READY is the time of the pin, and an eviction is its end. The
 * plan's region is only a limit to what the mate pins at a time; the unit's bytes are wherever the
 * owner has them.
 */
#include "sched/borrow.h"

#include "sched/engine_private.h"

static bool pin(struct lh_engine *engine, struct lh_unit *unit)
{
    uint64_t offset = 0;
    uint32_t index = (uint32_t)(unit - engine->units);
    struct lh_team *team = engine->opts.team;
    LH_ASSERT(index < engine->opts.unit_count && unit->state == LH_UNIT_STATE_LOADING);
    if (!lh_team_pin(team, index, &offset))
        return false;
    LH_ASSERT(offset + unit->desc->bytes <= team->region_bytes);
    unit->memory = team->region + offset;
    lh_core_stats(engine, unit->load.step)->bytes[LH_ENGINE_LINK_SHARED] += unit->desc->bytes;
    lh_unit_arrived(engine, unit);
    return true;
}

static void load(struct lh_engine *engine, struct lh_unit *unit, uint64_t step)
{
    struct lh_borrow *borrow = engine->borrow;
    LH_ASSERT(unit->state == LH_UNIT_STATE_LOADING);
    LH_ASSERT(borrow->waiting_count < engine->opts.unit_count);
    unit->load.priority = LH_PRIORITY_DEMAND;
    unit->load.step = step;
    borrow->waiting[borrow->waiting_count++] = (uint32_t)(unit - engine->units);
}

static void evicted(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(unit->state == LH_UNIT_STATE_ABSENT && unit->memory);
    lh_team_unpin(engine->opts.team, (uint32_t)(unit - engine->units));
}

/* Give back the units that no thread uses or waits for, and plan again without them. */
static void idle_give_back(struct lh_engine *engine)
{
    bool is_any = false;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        if (unit->state == LH_UNIT_STATE_READY && !lh_unit_is_awaited(engine, unit))
            is_any |= lh_unit_try_forget(engine, i);
    }
    if (is_any)
        lh_region_plan_around(engine);
}

/*
 * Whether a thread waits for a unit that is not in memory. The load of that unit may have to wait
 * for units that were to be read ahead: they arrive before their places are used again.
 */
static bool is_any_awaited(const struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        if (lh_unit_is_awaited(engine, unit) && unit->state != LH_UNIT_STATE_READY)
            return true;
    }
    return false;
}

/*
 * Take the units that the owner has by now, and say whether a thread waits for one of the others.
 * While the owner needs room, hold only units that a thread waits for or uses.
 */
static bool waiting_pump(struct lh_engine *engine)
{
    struct lh_borrow *borrow = engine->borrow;
    struct lh_team *team = engine->opts.team;
    bool is_short = lh_team_needs_room(team);
    LH_ASSERT(team->mate > 0 && borrow->waiting_count <= engine->opts.unit_count);
    uint32_t left = 0;
    uint32_t count = borrow->waiting_count;
    if (is_short)
        idle_give_back(engine);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t index = borrow->waiting[i];
        struct lh_unit *unit = lh_engine_unit_at(engine, index);
        bool may_pin = !is_short || lh_unit_is_awaited(engine, unit);
        if (!may_pin)
            lh_team_unwant(team, index);
        else if (pin(engine, unit) || (lh_team_want(team, index) && pin(engine, unit)))
            continue;
        borrow->waiting[left++] = index;
    }
    borrow->waiting_count = left;
    lh_team_waits_set(team, left > 0 && is_any_awaited(engine));
    return left < count;
}

static void unit_forgotten(struct lh_engine *engine, struct lh_unit *unit)
{
    struct lh_borrow *borrow = engine->borrow;
    uint32_t index = (uint32_t)(unit - engine->units);
    uint32_t left = 0;
    for (uint32_t i = 0; i < borrow->waiting_count; i++) {
        if (borrow->waiting[i] != index)
            borrow->waiting[left++] = borrow->waiting[i];
    }
    LH_ASSERT(left + 1 >= borrow->waiting_count); /* a unit waits once */
    if (left == borrow->waiting_count)
        return;
    borrow->waiting_count = left;
    lh_core_stats(engine, unit->load.step)->planned_bytes[LH_ENGINE_LINK_SHARED] -=
        unit->desc->bytes;
    lh_team_unwant(engine->opts.team, index);
    lh_unit_load_cancel(unit);
}

void lh_borrow_give_back(struct lh_engine *engine)
{
    LH_ASSERT(lh_engine_is_mate(engine) && engine->shared.is_paused);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, i);
        /* The accelerator's copy of a frozen unit stays valid. */
        if (unit->desc->elements > 0)
            LH_FEATURE_CALL(engine, unit_forgotten, unit);
        else
            unit_forgotten(engine, unit);
        if (unit->state == LH_UNIT_STATE_READY)
            lh_unit_forget(engine, i);
    }
    LH_ASSERT(engine->borrow->waiting_count == 0);
    lh_region_discard(engine);
}

static void use_begun(struct lh_engine *engine, uint32_t unit)
{
    struct lh_borrow *borrow = engine->borrow;
    (void)unit;
    borrow->use_count = engine->recording.count == 0 ? 1 : borrow->use_count + 1;
    lh_team_uses_set(engine->opts.team, borrow->use_count);
}

static bool is_busy(const struct lh_engine *engine)
{
    return engine->borrow->waiting_count > 0;
}

static const struct lh_source_ops source_ops = {.load = load, .evicted = evicted, .advice = ""};

const struct lh_feature lh_borrow_feature = {
    .name = "borrow",
    .use_begun = use_begun,
    .unit_forgotten = unit_forgotten,
    .pump_before = waiting_pump,
    .is_busy = is_busy,
};

int lh_borrow_create(struct lh_engine *engine, struct lh_error *err)
{
    uint32_t count = engine->opts.unit_count;
    if (engine->opts.team->unit_count != count)
        return lh_error_set(err, -EINVAL, "the team has %u units, not %u",
                            engine->opts.team->unit_count, count);
    LH_TRY(LH_ENGINE_PART_CREATE(engine, borrow, err));
    struct lh_borrow *borrow = engine->borrow;
    borrow->source = (struct lh_source){.ops = &source_ops, .is_of_units = true};
    borrow->waiting = lh_alloc_zeroed(engine->alloc, count, sizeof(*borrow->waiting));
    if (!borrow->waiting)
        return lh_error_set(err, -ENOMEM, "no memory for %u units", count);
    for (uint32_t i = 0; i < count; i++)
        engine->units[i].source = &borrow->source;
    return 0;
}

void lh_borrow_stop(struct lh_engine *engine)
{
    struct lh_team *team = engine->opts.team;
    LH_ASSERT(lh_engine_is_mate(engine) && engine->borrow);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, i);
        if (unit->state == LH_UNIT_STATE_READY)
            lh_unit_try_forget(engine, i);
        lh_team_unwant(team, i);
    }
    lh_team_waits_set(team, false);
}

void lh_borrow_destroy(struct lh_engine *engine)
{
    if (!engine->borrow)
        return;
    for (uint32_t i = 0; engine->borrow->waiting && i < engine->opts.unit_count; i++) {
        if (engine->units[i].state == LH_UNIT_STATE_READY)
            lh_team_unpin(engine->opts.team, i);
        lh_team_unwant(engine->opts.team, i);
    }
    lh_free(engine->alloc, engine->borrow->waiting);
}
