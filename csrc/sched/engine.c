/* The engine's thread and its inbox. Creation is in create.c, other threads' calls in calls.c. */
#include <inttypes.h>
#include <stdio.h>

#include "sched/engine_private.h"

/*
 * If nothing has moved for this long while a thread waits, the thread is stuck: nothing can make
 * room for what it needs.
 */
#define STUCK_AFTER_MS 300
#define PLAN_AROUND_AFTER_MS LH_QUIET_NAP_MS /* after this time, replanning is tried first */
#define NS_PER_MS UINT64_C(1000000)

static void waited(struct lh_engine *engine, const struct lh_ring_message *message)
{
    /* The step after the last close, though that one's updates may not be over. */
    struct lh_engine_step_stats *stats = lh_core_stats(engine, engine->step + 1);
    uint64_t start = message->words[2];
    uint64_t end = message->words[3];
    uint32_t unit = (uint32_t)message->words[1];
    LH_ASSERT(end >= start && (unit == LH_CHUNK_NONE || unit < engine->opts.unit_count));
    if (unit != LH_CHUNK_NONE)
        stats->param_wait_ns += end - start;
    else
        stats->gradient_wait_ns += end - start;
    lh_core_trace_add(
        engine, (struct lh_engine_trace_event){
                    .kind = LH_ENGINE_TRACE_WAIT, .unit = unit, .start_ns = start, .end_ns = end});
}

static void message_handle(struct lh_engine *engine, const struct lh_ring_message *message)
{
    bool handled = true;
    uint32_t argument = (uint32_t)message->words[1];
    switch ((enum lh_message_kind)message->words[0]) {
    case LH_MESSAGE_BEGIN:
        lh_step_begin(engine, (enum lh_engine_mode)argument);
        break;
    case LH_MESSAGE_USE:
        lh_unit_use(engine, argument);
        break;
    case LH_MESSAGE_ACQUIRE:
        lh_unit_acquire(engine, argument);
        break;
    case LH_MESSAGE_RELEASE:
        lh_unit_release(engine, argument);
        break;
    case LH_MESSAGE_HANDLES:
        lh_update_consider(engine, argument);
        break;
    case LH_MESSAGE_GRADIENT:
        lh_gradient_take(engine, argument, (const void *)(uintptr_t)message->words[2],
                         (enum lh_dtype)message->words[3]);
        break;
    case LH_MESSAGE_CLOSE:
        LH_ASSERT(message->words[2] <= engine->scalar_bytes_max);
        engine->scalar_bytes = message->words[2];
        lh_step_close(engine);
        break;
    case LH_MESSAGE_ABORT:
        lh_step_abort(engine);
        break;
    case LH_MESSAGE_FLUSH:
        engine->flush_is_asked = true;
        engine->flush_commits = argument != 0;
        break;
    case LH_MESSAGE_WAITED:
        waited(engine, message);
        break;
    case LH_MESSAGE_ANNOUNCED:
        lh_region_announced(engine, argument, message->words[2], message->words[3] != 0);
        break;
    default:
        handled = LH_FEATURE_ANY(engine, message, message);
        LH_ASSERT(handled || message->words[0] == LH_MESSAGE_DRAIN);
        break;
    }
}

/* Take the next message, unless it must wait. */
static bool inbox_pop(struct lh_engine *engine, struct lh_ring_message *message)
{
    /* An abandoned flush may still be committing: later messages wait for its end. */
    if (engine->commit_is_of_flush)
        return false;
    if (!engine->has_held && !lh_ring_pop(&engine->inbox, &engine->held))
        return false;
    engine->has_held = false;
    if (atomic_load(&engine->is_reopened))
        engine->has_held = LH_FEATURE_ANY(engine, message_is_held, &engine->held);
    *message = engine->held;
    return !engine->has_held;
}

static bool inbox_pump(struct lh_engine *engine)
{
    struct lh_ring_message message;
    bool moved = false;
    bool is_heard = false;
    while (inbox_pop(engine, &message)) {
        message_handle(engine, &message);
        atomic_fetch_add(&engine->heard_count, 1);
        is_heard = true;
        /* Waiting threads repeat these messages, so they do not count as progress. */
        moved |= message.words[0] != LH_MESSAGE_WAITED && message.words[0] != LH_MESSAGE_DRAIN;
    }
    if (is_heard)
        lh_core_notify(engine);
    return moved;
}

static bool is_heard(struct lh_engine *engine, uint64_t post_count)
{
    return atomic_load(&engine->heard_count) >= post_count;
}

int lh_engine_heard_wait(struct lh_engine *engine, int timeout_ms)
{
    return lh_engine_room_wait(engine, is_heard, atomic_load(&engine->post_count), timeout_ms);
}

/* After an error, only collect what is in flight, so that buffers can be freed. */
static bool failed_poll(struct lh_engine *engine)
{
    struct lh_ring_message message;
    LH_ASSERT(atomic_load(&engine->failed));
    bool moved = lh_transfer_drain(engine);
    moved |= lh_job_drain(engine);
    moved |= lh_copy_poll(engine);
    while (lh_ring_pop(&engine->inbox, &message))
        moved = true;
    return moved;
}

bool lh_engine_poll(struct lh_engine *engine)
{
    if (atomic_load(&engine->failed))
        return failed_poll(engine);
    bool moved = inbox_pump(engine);
    moved |= lh_transfer_poll(engine);
    moved |= lh_copy_poll(engine);
    if (!atomic_load(&engine->failed))
        moved |= lh_job_poll(engine);
    if (atomic_load(&engine->failed))
        return true;
    moved |= lh_unit_pump(engine);
    moved |= LH_FEATURE_PUMP(engine, pump_before);
    moved |= lh_update_pump(engine);
    moved |= LH_FEATURE_PUMP(engine, pump_after);
    moved |= lh_transfer_pump(engine);
    moved |= lh_step_pump(engine);
    return moved;
}

/* Whether a thread waits for a unit or a feature, and nothing in flight can end the wait. */
static bool is_stuck(const struct lh_engine *engine)
{
    if (engine->transfers.in_flight + engine->jobs_in_flight + engine->commit_in_flight +
            lh_copy_in_flight(engine) >
        0)
        return false;
    if (lh_step_is_held(engine) || atomic_load(&engine->tentative) > 0)
        return false;
    bool is_under_way = LH_FEATURE_ANY(engine, is_under_way);
    if (is_under_way)
        return false;
    bool is_awaited = atomic_load(&engine->waiting) > 0;
    struct lh_error err = {0};
    bool is_feature_stuck = LH_FEATURE_ANY(engine, is_stuck, &err);
    if (is_awaited && is_feature_stuck)
        return true;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        bool is_owed_update = unit->update.is_queued && unit->state == LH_UNIT_STATE_ABSENT;
        bool is_wanted = LH_FEATURE_ANY(engine, unit_is_wanted, unit);
        if (unit->waiter_count > 0 || is_wanted || (is_awaited && is_owed_update))
            return true;
    }
    return false;
}

/*
 * Refuse the units that threads wait for, and discard the plan. Returns false if no thread waits.
 */
static bool waiters_refuse(struct lh_engine *engine, const struct lh_error *err)
{
    uint32_t refused_count = 0;
    LH_ASSERT(err->code < 0);
    pthread_mutex_lock(&engine->shared.mutex);
    engine->shared.refusal = *err;
    pthread_mutex_unlock(&engine->shared.mutex);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, i);
        if (unit->waiter_count == 0)
            continue;
        refused_count += unit->waiter_count;
        if (lh_unit_pins(unit) == 0)
            unit->use_is_open = false;
        atomic_fetch_add(&unit->shared.refusals, unit->waiter_count);
        unit->waiter_count = 0;
    }
    if (refused_count == 0)
        return false;
    lh_region_forget(engine);
    lh_core_notify(engine);
    return true;
}

/* The unit that a thread waits for; otherwise one whose update waits for it to be loaded. */
static uint32_t wanted_find(const struct lh_engine *engine)
{
    uint32_t wanted = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        if (unit->waiter_count > 0)
            return i;
        if (unit->update.is_queued && unit->state == LH_UNIT_STATE_ABSENT)
            wanted = i;
    }
    return wanted;
}

static void no_room_say(const struct lh_engine *engine, struct lh_error *err)
{
    const uint32_t wanted = wanted_find(engine);
    uint64_t all_bytes = 0;
    uint64_t in_use_bytes = 0;
    uint32_t in_use_count = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        all_bytes += unit->desc->place_bytes;
        if (lh_unit_pins(unit) > 0) {
            in_use_count++;
            in_use_bytes += unit->desc->place_bytes;
        }
    }
    char remedy[192];
    /* With copies, a thread waits for room on the accelerator, and an update in main memory. */
    bool is_there = engine->copies_units && engine->units[wanted].waiter_count > 0;
    if (is_there)
        snprintf(remedy, sizeof(remedy),
                 "debug.device_param_bytes (with %" PRIu64
                 " bytes, all of them stay on the device)",
                 all_bytes);
    else
        snprintf(remedy, sizeof(remedy),
                 "host_bytes, of which parameters get a part (with %" PRIu64
                 " bytes, all of them stay in memory)",
                 engine->budget.host_bytes_full);
    lh_error_set(err, -ENOSPC,
                 "unit %u needs %" PRIu64 " bytes in one piece, and %u units in use hold %" PRIu64
                 " of the %" PRIu64 " bytes for parameters: delete tensors that are views of"
                 " parameters, set gradient_checkpointing = True on the model before wrap if"
                 " torch.utils.checkpoint recomputes it (whole blocks then count as in use), or"
                 " raise %s",
                 wanted, engine->units[wanted].desc->place_bytes, in_use_count, in_use_bytes,
                 is_there ? engine->opts.device_bytes : engine->budget.region_bytes, remedy);
}

static void stuck_fail(struct lh_engine *engine)
{
    struct lh_error err = {0};
    bool is_busy = LH_FEATURE_ANY(engine, is_busy);
    if (is_busy)
        return;
    bool is_feature_stuck = LH_FEATURE_ANY(engine, is_stuck, &err);
    if (is_feature_stuck) {
        lh_core_fail(engine, &err);
        return;
    }
    no_room_say(engine, &err);
    if (!waiters_refuse(engine, &err))
        lh_core_fail(engine, &err);
}

static bool may_pause_now(const struct lh_engine *engine)
{
    /* A failed engine is not paused: requests may be in flight, and the caller gets the error. */
    return atomic_load(&engine->pausing) && !atomic_load(&engine->failed) &&
           lh_step_is_quiet(engine);
}

static void pause_here(struct lh_engine *engine)
{
    pthread_mutex_lock(&engine->shared.mutex);
    LH_ASSERT(!engine->shared.is_paused);
    engine->shared.is_paused = true;
    pthread_cond_broadcast(&engine->shared.changed);
    while (atomic_load(&engine->pausing) && !atomic_load(&engine->stopping))
        pthread_cond_wait(&engine->shared.changed, &engine->shared.mutex);
    engine->shared.is_paused = false;
    pthread_mutex_unlock(&engine->shared.mutex);
}

/* A dead device does not wake the engine, so do not sleep forever while copies are in flight. */
static int sleep_ms(const struct lh_engine *engine)
{
    return lh_copy_in_flight(engine) > 0 ? LH_DEV_SLEEP_MS_MAX : -1;
}

int lh_engine_quiet(struct lh_engine *engine, struct lh_quiet *quiet)
{
    bool stuck = !atomic_load(&engine->failed) && is_stuck(engine);
    uint64_t now = lh_core_now(engine);
    if (stuck && quiet->since_ns == 0)
        quiet->since_ns = now;
    uint64_t quiet_ns = stuck ? now - quiet->since_ns : 0;
    if (quiet_ns > PLAN_AROUND_AFTER_MS * NS_PER_MS && !quiet->is_planned_around) {
        quiet->is_planned_around = true;
        lh_region_plan_around(engine);
        return 0;
    }
    if (quiet_ns > STUCK_AFTER_MS * NS_PER_MS)
        stuck_fail(engine);
    return stuck ? LH_QUIET_NAP_MS : -1;
}

void *lh_engine_thread_run(void *context)
{
    struct lh_engine *engine = context;
    struct lh_quiet quiet = {0};
    while (!atomic_load(&engine->stopping)) {
        if (may_pause_now(engine))
            pause_here(engine);
        if (lh_engine_poll(engine)) {
            quiet = (struct lh_quiet){0};
            continue;
        }
        lh_waker_prepare(engine->waker);
        if (lh_engine_poll(engine) || atomic_load(&engine->stopping) || may_pause_now(engine)) {
            lh_waker_cancel(engine->waker);
            continue;
        }
        int ms = lh_engine_quiet(engine, &quiet);
        if (ms == 0)
            lh_waker_cancel(engine->waker);
        else
            lh_waker_wait(engine->waker, ms > 0 ? ms : sleep_ms(engine));
    }
    /* Collect what is in flight: the buffers are about to be freed. */
    atomic_store(&engine->failed, true);
    lh_core_notify(engine);
    while (engine->transfers.in_flight + engine->jobs_in_flight + lh_copy_in_flight(engine) > 0) {
        lh_waker_prepare(engine->waker);
        if (failed_poll(engine))
            lh_waker_cancel(engine->waker);
        else
            lh_waker_wait(engine->waker, sleep_ms(engine));
    }
    return NULL;
}

uint32_t lh_engine_state_bytes(const struct lh_engine_unit *unit)
{
    const struct lh_rule_row *rule = &lh_rules[unit->rule];
    if (unit->elements == 0)
        return 0;
    uint64_t bytes = unit->average_extent > 0 ? sizeof(float) : 0;
    if (!unit->is_given) {
        bytes += rule->has_moment1 ? lh_adam_moment1_bytes(unit->states) : 0;
        bytes += rule->has_moment2 ? lh_adam_moment2_bytes(unit->states) : 0;
        bytes += lh_adam_residual_bytes(unit->dtype);
    }
    return (uint32_t)bytes;
}
