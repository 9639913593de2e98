/*
 * The owner's side of a team (team/team.h): units that are READY in main memory are lent to mates,
 * which pin them where they are.
 *
 * Mates use the units in the order of the owner, somewhat earlier or later. If a mate is late, its
 * pins delay the owner's evictions; if it is early, it waits for the loads of the owner's plan. So
 * usually the mates' wants need no loads of their own. A unit that a late mate wants was evicted
 * before the mate used it: it is owed to the mate, like a unit that a thread of this process waits
 * for. So is any unit that a mate wants while nothing else happens.
 *
 * [Note: A step that mates see] A mate closes a step when its backward has ended in all processes:
 * it gives everything back, and waits until the owner announces the step (lh_team_step_set). Before
 * that, the owner takes all units away from the mates that the step updates, and makes each of them
 * available again once it is updated. So mates begin their next forward while updates are made, and
 * never pin a unit with the parameters of the step before.
 */
#include "sched/mates.h"

#include "sched/engine_private.h"

static uint32_t index_of(const struct lh_engine *engine, const struct lh_unit *unit)
{
    LH_ASSERT(unit >= engine->units && unit < engine->units + engine->opts.unit_count);
    return (uint32_t)(unit - engine->units);
}

/* Count the uses of a cycle. */
static void use_begun(struct lh_engine *engine, uint32_t unit)
{
    (void)unit;
    engine->mates->use_count = engine->recording.count == 0 ? 1 : engine->mates->use_count + 1;
}

/* Whether a mate that wants the unit has begun fewer uses in its cycle than this process. */
static bool is_late(const struct lh_engine *engine, uint32_t unit)
{
    const struct lh_team *team = engine->opts.team;
    uint64_t wants = lh_team_wants(team, unit);
    LH_ASSERT(wants >> team->mate_count <= 1);
    for (uint32_t mate = 1; mate <= team->mate_count; mate++) {
        if ((wants >> mate & 1) && lh_team_uses(team, mate) <= engine->mates->use_count)
            return true;
    }
    return false;
}

/* Look for new wants; plan loads for mates that are late, and in room that mates have made. */
static bool wants_pump(struct lh_engine *engine)
{
    const struct lh_team *team = engine->opts.team;
    uint64_t count = lh_team_want_count(team);
    LH_ASSERT(count >= engine->mates->want_count);
    uint64_t returned_count = lh_team_returned_count(team);
    bool is_owed = returned_count != engine->mates->returned_count;
    if (count == engine->mates->want_count && !is_owed)
        return false;
    engine->mates->want_count = count;
    engine->mates->returned_count = returned_count;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, i);
        /* A stale unit comes for its update, after which the mate gets it. */
        if (unit->state != LH_UNIT_STATE_ABSENT || lh_unit_is_stale(engine, unit) ||
            lh_team_wants(team, i) == 0)
            continue;
        is_owed |= is_late(engine, i);
        unit->parts->mates.is_wanted = true;
    }
    if (is_owed)
        lh_region_plan_around(engine);
    return true;
}

/* Whether the unit must come into main memory to be updated, for which every process waits. */
static bool is_owed_update(const struct lh_unit *unit)
{
    return unit->update.is_queued && !unit->update.is_done;
}

/* Whether any process wants a unit that is not in main memory, for a thread or to read ahead. */
static bool is_any_wanted(const struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        bool is_wanted = unit->parts->mates.is_wanted || is_owed_update(unit);
        is_wanted |= lh_unit_is_awaited(engine, unit);
        if (is_wanted && unit->state == LH_UNIT_STATE_ABSENT)
            return true;
    }
    return false;
}

/* The same, for a thread that waits or an update. */
static bool is_any_awaited(const struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        bool is_awaited = unit->parts->mates.is_wanted && lh_team_is_awaited(engine->opts.team, i);
        is_awaited |= lh_unit_is_awaited(engine, unit) || is_owed_update(unit);
        if (is_awaited && unit->state == LH_UNIT_STATE_ABSENT)
            return true;
    }
    return false;
}

/* All units that were wanted have room now. Mates withdraw some wants while they are asked. */
static bool room_pump(struct lh_engine *engine)
{
    struct lh_team *team = engine->opts.team;
    if (lh_team_needs_room(team) && !is_any_wanted(engine))
        lh_team_room_ask(team, false);
    return false;
}

static void unit_ready(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(unit->state == LH_UNIT_STATE_READY);
    unit->parts->mates.is_wanted = false;
    if (lh_unit_is_stale(engine, unit))
        return; /* it is ready again after its update: see [Note: A step that mates see] */
    lh_team_publish(engine->opts.team, index_of(engine, unit), unit->offset);
}

static bool unit_may_claim(struct lh_engine *engine, struct lh_unit *unit)
{
    return lh_team_claim(engine->opts.team, index_of(engine, unit));
}

static bool unit_is_wanted(const struct lh_engine *engine, const struct lh_unit *unit)
{
    LH_ASSERT(engine->opts.team->mate == 0);
    return unit->parts->mates.is_wanted;
}

static bool unit_is_lent(const struct lh_engine *engine, const struct lh_unit *unit)
{
    return lh_team_is_pinned(engine->opts.team, index_of(engine, unit));
}

static void step_closed(struct lh_engine *engine)
{
    LH_ASSERT(engine->step_state == LH_STEP_STATE_CLOSED);
    engine->mates->is_closing = true;
}

/* See [Note: A step that mates see]. Mates wake the owner when they drop their last pins. */
static bool close_pump(struct lh_engine *engine)
{
    struct lh_team *team = engine->opts.team;
    if (!engine->mates->is_closing)
        return false;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        bool is_shown = unit->state == LH_UNIT_STATE_READY && lh_unit_is_stale(engine, unit);
        if (is_shown && !lh_team_claim(team, i))
            return false;
    }
    engine->mates->is_closing = false;
    lh_team_step_set(team, engine->step);
    return true;
}

static bool team_pump(struct lh_engine *engine)
{
    bool is_announced = close_pump(engine);
    return wants_pump(engine) || is_announced;
}

/* Whether a process that does not wait uses units, and so will make room. */
static bool is_busy(const struct lh_engine *engine)
{
    bool is_any = lh_team_is_busy(engine->opts.team);
    if (engine->dev || atomic_load(&engine->waiting) > 0)
        return is_any;
    for (uint32_t i = 0; !is_any && i < engine->opts.unit_count; i++)
        is_any = lh_unit_pins(&engine->units[i]) > 0;
    return is_any;
}

/*
 * Nothing is in flight. If a unit is awaited, mates' pins may be in its way, even where the plan
 * has chosen other places because of them: ask for what mates do not use.
 */
static bool is_stuck(const struct lh_engine *engine, struct lh_error *err)
{
    bool is_any = is_any_wanted(engine);
    if (is_any_awaited(engine))
        lh_team_room_ask(engine->opts.team, true);
    for (uint32_t i = 0; is_any && i < engine->opts.unit_count; i++) {
        if (!engine->units[i].parts->mates.is_wanted)
            continue;
        lh_error_set(err, -ENOSPC,
                     "unit %u, which another process of this machine waits for, has no room beside"
                     " the units in use: raise host_bytes",
                     i);
        return true;
    }
    return false;
}

int lh_mates_create(struct lh_engine *engine, struct lh_error *err)
{
    const struct lh_team *team = engine->opts.team;
    if (team->unit_count != engine->opts.unit_count ||
        team->region_bytes < engine->budget.region_bytes)
        return lh_error_set(
            err, -EINVAL, "the team's memory is for %u units in %llu bytes, not for %u in %llu",
            team->unit_count, (unsigned long long)team->region_bytes, engine->opts.unit_count,
            (unsigned long long)engine->budget.region_bytes);
    return LH_ENGINE_PART_CREATE(engine, mates, err);
}

const struct lh_feature lh_mates_feature = {
    .name = "mates",
    .use_begun = use_begun,
    .unit_ready = unit_ready,
    .unit_may_claim = unit_may_claim,
    .unit_is_wanted = unit_is_wanted,
    .unit_is_lent = unit_is_lent,
    .step_closed = step_closed,
    .pump_before = team_pump,
    .pump_after = room_pump,
    .is_busy = is_busy,
    .is_stuck = is_stuck,
};
