/*
 * The feature of idle units ([Note: Idle units] in idle.h): which units owe a step, and when they
 * are settled.
 */
#include "sched/settle.h"

#include <inttypes.h>
#include <string.h>

#include "sched/engine_private.h"

/* Units whose settlement is queued at the same time, if no thread waits for them. */
#define SETTLE_AHEAD 2

/*
 * The number of owed steps after which a unit is settled, at least half of LH_IDLE_STEPS_MAX: units
 * that are never used are not all settled in the same step.
 */
static uint32_t owed_max(uint32_t unit)
{
    return LH_IDLE_STEPS_MAX - unit % (LH_IDLE_STEPS_MAX / 2);
}

/* While a unit of a family is used, settle the one that was announced to be the next. */
static void use_begun(struct lh_engine *engine, uint32_t index)
{
    const struct lh_region *region = engine->uses;
    const struct lh_residency_event *events = region->predicted.events;
    uint64_t at = region->position;
    if (engine->units[index].desc->family == 0)
        return;
    while (at < region->predicted.count &&
           (events[at].kind != LH_RESIDENCY_EVENT_BEGIN || events[at].unit == index))
        at++;
    if (at < region->predicted.count && engine->units[events[at].unit].desc->is_announced)
        lh_idle_want(engine, lh_engine_unit_at(engine, events[at].unit));
}

/* A unit's gradient must not overtake what the unit owes. */
static bool gradient_accepts(struct lh_engine *engine, struct lh_unit *unit)
{
    struct lh_error err = {0};
    uint32_t owed = atomic_load(&unit->update.idle.owed);
    if (owed == 0)
        return true;
    lh_error_set(&err, -ESTALE,
                 "a gradient of unit %u is of a forward before the last step, in which the unit had"
                 " no gradient: it owes %u updates, which come first. Run backward before step()",
                 (uint32_t)(unit - engine->units), owed);
    lh_core_fail(engine, &err);
    return false;
}

/* Queue the updates that a unit owes, in the closed step. */
static void settle(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    LH_ASSERT(engine->step_state == LH_STEP_STATE_CLOSED);
    LH_ASSERT(unit->update.gradient_count == 0 && !unit->update.idle.is_due);
    unit->update.idle.is_due = true;
    unit->update.gradient_count = unit->desc->param_count;
    engine->updates.gradient_unit_count++;
    engine->idle->queued_count++;
    lh_update_plan_settled(engine, unit);
    lh_defer_release(unit);
    lh_update_consider(engine, index);
}

static void partial_fail(struct lh_engine *engine, const struct lh_unit *unit)
{
    struct lh_error err = {0};
    lh_error_set(
        &err, -EOPNOTSUPP,
        "unit %u has gradients for %u of its %u parameters, but the updates that idle units"
        " owe are known only for whole units: use idle=\"skip\"",
        (uint32_t)(unit - engine->units), unit->update.gradient_count, unit->desc->param_count);
    lh_core_fail(engine, &err);
}

/* Whether each family has a gradient in the step, as 1 or 0. */
static const uint64_t *families_used(struct lh_engine *engine)
{
    uint64_t *used = engine->idle->family_steps;
    memset(used, 0, ((uint64_t)engine->idle->family_count + 1) * sizeof(*used));
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        if (unit->update.gradient_count > 0)
            used[unit->desc->family] = 1;
    }
    return used;
}

static void step_closed(struct lh_engine *engine)
{
    struct lh_idle *idle = engine->idle;
    LH_ASSERT(engine->step_state == LH_STEP_STATE_CLOSED);
    lh_idle_history_keep(engine);
    idle->is_drained = false;
    const uint64_t *used = families_used(engine);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        uint32_t count = unit->update.gradient_count;
        if (unit->desc->family == 0 || count == unit->desc->param_count)
            continue;
        if (count > 0 && unit->desc->averages_idle)
            continue; /* the step ends with an error: [Note: Averages of all steps] */
        if (count > 0) {
            partial_fail(engine, unit);
            return;
        }
        uint32_t owed = atomic_load(&unit->update.idle.owed);
        bool is_used = used[unit->desc->family] > 0;
        if (unit->desc->averages_idle)
            is_used = engine->param_steps[unit->desc->param_first] > 0;
        lh_idle_owed_set(engine, unit, owed + is_used);
        if (is_used)
            unit->update.idle.last = engine->step;
        if (!is_used || owed + 1 >= owed_max(i))
            lh_idle_want(engine, unit);
        if (unit->desc->averages_idle)
            lh_idle_want(engine, unit);
    }
}

static bool is_awaited(const struct lh_engine *engine)
{
    bool is_any = engine->idle->settles_all;
    LH_ASSERT(engine->step_state == LH_STEP_STATE_OPEN);
    for (uint32_t i = 0; !is_any && i < engine->opts.unit_count; i++)
        is_any = engine->units[i].update.idle.is_wanted && engine->units[i].waiter_count > 0;
    return is_any;
}

/* Close the last step again, for the units that are wanted. Returns whether it is closed. */
static bool reopen(struct lh_engine *engine)
{
    struct lh_error err = {0};
    if (engine->updates.gradient_unit_count > 0 && !is_awaited(engine))
        return false; /* a thread has given up its wait */
    if (engine->updates.gradient_unit_count > 0) {
        lh_error_set(&err, -EBUSY,
                     "a parameter without a gradient in the last step is read between backward and"
                     " step(): read it before the backward, or after step()");
        lh_core_fail(engine, &err);
        return false;
    }
    engine->idle->is_drained = false;
    lh_step_reopen(engine);
    return true;
}

/* Settle the units for which threads wait, and of the other wanted ones a few at a time. */
static bool wanted_settle(struct lh_engine *engine)
{
    struct lh_idle *idle = engine->idle;
    bool moved = false;
    LH_ASSERT(engine->step_state == LH_STEP_STATE_CLOSED);
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; idle->wanted_count > 0 && i < engine->opts.unit_count; i++) {
            struct lh_unit *unit = &engine->units[i];
            bool is_asked = LH_FEATURE_ANY(engine, unit_is_awaited, unit);
            is_asked |= unit->waiter_count > 0;
            bool may_settle = pass == 0 ? is_asked : idle->queued_count < SETTLE_AHEAD;
            if (!unit->update.idle.is_wanted || !may_settle)
                continue;
            unit->update.idle.is_wanted = false;
            idle->wanted_count--;
            settle(engine, i);
            moved = true;
        }
    }
    return moved;
}

/* Settle all units, a few at a time. Returns whether another one was queued, or all are settled. */
static bool all_settle(struct lh_engine *engine)
{
    struct lh_idle *idle = engine->idle;
    bool moved = false;
    while (idle->queued_count < SETTLE_AHEAD && idle->settle_next < engine->opts.unit_count) {
        struct lh_unit *unit = &engine->units[idle->settle_next++];
        if (atomic_load(&unit->update.idle.owed) == 0 || unit->update.idle.is_due)
            continue;
        LH_ASSERT(idle->wanted_count >= unit->update.idle.is_wanted);
        idle->wanted_count -= unit->update.idle.is_wanted;
        unit->update.idle.is_wanted = false;
        settle(engine, idle->settle_next - 1);
        moved = true;
    }
    if (idle->settle_next < engine->opts.unit_count || atomic_load(&idle->owing) > 0)
        return moved;
    idle->settles_all = false;
    idle->is_drained = true;
    lh_request_reply(engine, LH_REQUEST_SETTLE);
    return true;
}

static bool pump_before(struct lh_engine *engine)
{
    struct lh_idle *idle = engine->idle;
    bool moved = false;
    if (idle->wanted_count == 0 && !idle->settles_all)
        return false;
    if (engine->step_state == LH_STEP_STATE_OPEN) {
        if (idle->wanted_count == 0 && atomic_load(&idle->owing) == 0)
            return all_settle(engine);
        if (!reopen(engine))
            return false;
        moved = true;
    }
    if (engine->step_state != LH_STEP_STATE_CLOSED)
        return false;
    moved |= wanted_settle(engine);
    return (idle->settles_all && all_settle(engine)) || moved;
}

/* A unit whose bytes a thread still reads cannot be settled, nor can the thread wait for it. */
static bool is_stuck(const struct lh_engine *engine, struct lh_error *err)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        if (!unit->update.idle.is_due || unit->update.is_queued || lh_unit_pins(unit) == 0)
            continue;
        lh_error_set(err, -EBUSY,
                     "unit %u owes updates, and tensors are still views of it: delete them before"
                     " the parameter is used or read again",
                     i);
        return true;
    }
    return false;
}

static bool message(struct lh_engine *engine, const struct lh_ring_message *message)
{
    if (message->words[0] == LH_MESSAGE_SETTLE) {
        engine->idle->settles_all = true;
        engine->idle->settle_next = 0;
        return true;
    }
    if (message->words[0] == LH_MESSAGE_DRAIN)
        engine->idle->is_drained = true;
    return false; /* other features wait for the drain, too */
}

static bool unit_is_owing(const struct lh_engine *engine, const struct lh_unit *unit)
{
    (void)engine;
    return atomic_load(&unit->update.idle.owed) > 0;
}

static void chunk_job(struct lh_engine *engine, const struct lh_chunk *chunk,
                      struct lh_exec_job *job)
{
    if (engine->units[chunk->unit].update.idle.is_due)
        job->run = lh_idle_run;
}

static bool step_may_end(const struct lh_engine *engine)
{
    const struct lh_idle *idle = engine->idle;
    return (idle->is_drained || engine->flush_is_asked) && idle->wanted_count == 0 &&
           !idle->settles_all;
}

static void step_forgotten(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        engine->units[i].update.idle.is_due = false;
        LH_ASSERT(engine->units[i].update.idle.made == 0);
    }
}

int lh_settle_all(struct lh_engine *engine, int timeout_ms)
{
    if (atomic_load(&engine->failed))
        return lh_core_fail_code(engine);
    if (lh_request_is_pending(&engine->requests[LH_REQUEST_SETTLE])) {
        lh_request_join(engine, LH_REQUEST_SETTLE);
    } else if (lh_request_is_current(engine, LH_REQUEST_SETTLE)) {
        return lh_request_wait(engine, LH_REQUEST_SETTLE, timeout_ms);
    } else if ((!engine->idle || atomic_load(&engine->idle->owing) == 0) &&
               !lh_request_is_pending(&engine->requests[LH_REQUEST_CLOSE])) {
        return 1; /* a step whose close the engine has not handled may be owed */
    } else {
        lh_request_send(engine, LH_REQUEST_SETTLE);
        lh_engine_post(engine, LH_MESSAGE_SETTLE, 0, 0, 0);
    }
    return lh_request_wait(engine, LH_REQUEST_SETTLE, timeout_ms);
}

const struct lh_feature lh_settle_feature = {
    .name = "settle",
    .resumed = lh_idle_resume,
    .message = message,
    .message_is_held = lh_idle_holds,
    .unit_asked = lh_idle_want,
    .unit_is_owing = unit_is_owing,
    .use_begun = use_begun,
    .gradient_accepts = gradient_accepts,
    .chunk_job = chunk_job,
    .unit_computed = lh_idle_settled,
    .step_closed = step_closed,
    .step_may_end = step_may_end,
    .steps_advanced = lh_idle_steps_advance,
    .step_forgotten = step_forgotten,
    .pump_before = pump_before,
    .is_stuck = is_stuck,
};
