/*
 * The engine's thread, its inbox, and the calls that other threads make. Creation is in create.c.
 */
#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "sched/engine_private.h"

/*
 * A waiter for whom nothing moves this long is stuck for good: what it needs cannot be made room
 * for.
 */
#define STUCK_AFTER_MS 300
#define PLAN_AROUND_AFTER_MS 50 /* a new plan is tried first */
#define NS_PER_MS UINT64_C(1000000)

uint64_t lh_engine_now(const struct lh_engine *engine)
{
    return lh_clock_now_ns(&engine->clock);
}

void lh_engine_notify(struct lh_engine *engine)
{
    if (atomic_load(&engine->waiting) == 0)
        return;
    pthread_mutex_lock(&engine->shared.mutex);
    pthread_cond_broadcast(&engine->shared.changed);
    pthread_mutex_unlock(&engine->shared.mutex);
}

void lh_engine_fail(struct lh_engine *engine, const struct lh_error *err)
{
    pthread_mutex_lock(&engine->shared.mutex);
    if (engine->shared.error.code == 0)
        engine->shared.error = *err;
    atomic_store(&engine->failed, true);
    pthread_cond_broadcast(&engine->shared.changed);
    pthread_mutex_unlock(&engine->shared.mutex);
}

int lh_engine_error(struct lh_engine *engine, struct lh_error *err)
{
    if (!atomic_load(&engine->failed))
        return 0;
    pthread_mutex_lock(&engine->shared.mutex);
    int code = engine->shared.error.code;
    if (err)
        *err = engine->shared.error;
    pthread_mutex_unlock(&engine->shared.mutex);
    return code;
}

void lh_engine_trace_add(struct lh_engine *engine, struct lh_engine_trace_event event)
{
    if (engine->opts.trace_count == 0)
        return;
    event.step = (uint32_t)lh_step_current(engine);
    engine->trace[engine->trace_written++ % engine->opts.trace_count] = event;
}

uint32_t lh_engine_trace(struct lh_engine *engine, struct lh_engine_trace_event *events,
                         uint32_t event_max)
{
    uint64_t kept = lh_min_u64(engine->trace_written, engine->opts.trace_count);
    uint32_t count = (uint32_t)lh_min_u64(kept, event_max);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t index = engine->trace_written - count + i;
        events[i] = engine->trace[index % engine->opts.trace_count];
    }
    return count;
}

static void waited(struct lh_engine *engine, const struct lh_ring_message *message)
{
    struct lh_engine_step_stats *stats = lh_step_stats(engine, lh_step_current(engine));
    uint64_t start = message->words[2];
    uint64_t end = message->words[3];
    uint32_t unit = (uint32_t)message->words[1];
    if (unit != LH_CHUNK_NONE)
        stats->param_wait_ns += end - start;
    else
        stats->gradient_wait_ns += end - start;
    lh_engine_trace_add(
        engine, (struct lh_engine_trace_event){
                    .kind = LH_ENGINE_TRACE_WAIT, .unit = unit, .start_ns = start, .end_ns = end});
}

static void message_handle(struct lh_engine *engine, const struct lh_ring_message *message)
{
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
        lh_update_gradient(engine, argument, (const void *)(uintptr_t)message->words[2],
                           (enum lh_dtype)message->words[3]);
        break;
    case LH_MESSAGE_CLOSE:
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
    }
}

static bool inbox_pump(struct lh_engine *engine)
{
    struct lh_ring_message message;
    bool moved = false;
    /* A flush whose caller gave up may be committing still: what comes after it waits here. */
    while (!engine->commit_is_of_flush && lh_ring_pop(&engine->inbox, &message)) {
        message_handle(engine, &message);
        /* Somebody who waits reports so again and again; that moves nothing. */
        moved |= message.words[0] != LH_MESSAGE_WAITED;
    }
    return moved;
}

/* After an error only what is in flight is taken back, so that buffers can be freed. */
static bool failed_poll(struct lh_engine *engine)
{
    struct lh_io_request *requests[32];
    struct lh_exec_job *jobs[32];
    struct lh_ring_message message;
    uint32_t io_count = engine->io->ops->poll(engine->io, requests, LH_COUNT_OF(requests));
    uint32_t job_count = engine->exec->ops->poll(engine->exec, jobs, LH_COUNT_OF(jobs));
    LH_ASSERT(engine->io_in_flight >= io_count && engine->jobs_in_flight >= job_count);
    engine->io_in_flight -= io_count;
    engine->jobs_in_flight -= job_count;
    bool moved = io_count + job_count > 0;
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
    if (!atomic_load(&engine->failed))
        moved |= lh_job_poll(engine);
    if (atomic_load(&engine->failed))
        return true;
    moved |= lh_unit_pump(engine);
    moved |= lh_update_pump(engine);
    moved |= lh_transfer_pump(engine);
    moved |= lh_step_pump(engine);
    return moved;
}

/* Somebody waits for a unit, and nothing under way can make room for it. */
static bool is_stuck(const struct lh_engine *engine)
{
    if (engine->io_in_flight + engine->jobs_in_flight + engine->commit_in_flight > 0)
        return false;
    bool is_awaited = atomic_load(&engine->waiting) > 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        bool is_owed_update = unit->update_is_queued && unit->state == LH_UNIT_STATE_ABSENT;
        if (unit->waiter_count > 0 || (is_awaited && is_owed_update))
            return true;
    }
    return false;
}

static void stuck_fail(struct lh_engine *engine)
{
    struct lh_error err = {0};
    uint64_t in_use_bytes = 0;
    uint32_t in_use_count = 0;
    uint32_t wanted = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        if (unit->waiter_count > 0 ||
            (unit->update_is_queued && unit->state == LH_UNIT_STATE_ABSENT))
            wanted = i;
        if (lh_unit_pins(unit) > 0) {
            in_use_count++;
            in_use_bytes += unit->desc.bytes;
        }
    }
    lh_error_set(&err, -ENOSPC,
                 "unit %u needs %" PRIu64 " bytes, and %u units in use hold %" PRIu64
                 " of the %" PRIu64 " bytes for parameters: raise host_bytes by %" PRIu64
                 ", or let go of tensors that"
                 " are views of parameters",
                 wanted, engine->units[wanted].desc.bytes, in_use_count, in_use_bytes,
                 engine->budget.region_bytes, 2 * engine->units[wanted].desc.bytes);
    lh_engine_fail(engine, &err);
}

static void pause_here(struct lh_engine *engine)
{
    pthread_mutex_lock(&engine->shared.mutex);
    engine->shared.is_paused = true;
    pthread_cond_broadcast(&engine->shared.changed);
    while (atomic_load(&engine->pausing) && !atomic_load(&engine->stopping))
        pthread_cond_wait(&engine->shared.changed, &engine->shared.mutex);
    engine->shared.is_paused = false;
    pthread_mutex_unlock(&engine->shared.mutex);
}

void *lh_engine_thread_run(void *context)
{
    struct lh_engine *engine = context;
    uint64_t quiet_since_ns = 0;
    bool is_planned_around = false;
    while (!atomic_load(&engine->stopping)) {
        bool may_pause = atomic_load(&engine->failed) || lh_engine_is_quiet(engine);
        if (atomic_load(&engine->pausing) && may_pause)
            pause_here(engine);
        if (lh_engine_poll(engine)) {
            quiet_since_ns = 0;
            is_planned_around = false;
            continue;
        }
        lh_waker_prepare(engine->waker);
        if (lh_engine_poll(engine) || atomic_load(&engine->stopping)) {
            lh_waker_cancel(engine->waker);
            continue;
        }
        bool stuck = !atomic_load(&engine->failed) && is_stuck(engine);
        uint64_t now = lh_engine_now(engine);
        if (stuck && quiet_since_ns == 0)
            quiet_since_ns = now;
        uint64_t quiet_ns = stuck ? now - quiet_since_ns : 0;
        if (quiet_ns > PLAN_AROUND_AFTER_MS * NS_PER_MS && !is_planned_around) {
            is_planned_around = true;
            lh_unit_plan_around(engine);
            lh_waker_cancel(engine->waker);
            continue;
        }
        if (quiet_ns > STUCK_AFTER_MS * NS_PER_MS)
            stuck_fail(engine);
        lh_waker_wait(engine->waker, stuck ? PLAN_AROUND_AFTER_MS : -1);
    }
    /* Take back what is in flight: its buffers are about to be freed. */
    atomic_store(&engine->failed, true);
    while (engine->io_in_flight + engine->jobs_in_flight > 0) {
        lh_waker_prepare(engine->waker);
        if (failed_poll(engine))
            lh_waker_cancel(engine->waker);
        else
            lh_waker_wait(engine->waker, -1);
    }
    return NULL;
}

/* --- Calls of other threads --------------------------------------------------------------- */

static int fail_code(struct lh_engine *engine)
{
    int code = lh_engine_error(engine, NULL);
    return code < 0 ? code : -ECANCELED;
}

static void post(struct lh_engine *engine, enum lh_message_kind kind, uint64_t a, uint64_t b,
                 uint64_t c)
{
    struct lh_ring_message message = {.words = {kind, a, b, c}};
    while (!lh_ring_push(&engine->inbox, message)) {
        if (atomic_load(&engine->failed) || atomic_load(&engine->stopping))
            return;
        lh_waker_wake(engine->waker);
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    lh_waker_wake(engine->waker);
}

typedef bool (*wait_fn)(struct lh_engine *engine, uint64_t argument);

/* 1 when is_done(argument), 0 after timeout_ms, -errno once the engine failed. */
static int wait_until(struct lh_engine *engine, wait_fn is_done, uint64_t argument, int timeout_ms)
{
    /* The condition waits on CLOCK_MONOTONIC, whatever clock the engine itself was given. */
    struct lh_clock clock = lh_clock_real();
    uint64_t until_ns = lh_clock_now_ns(&clock) + (uint64_t)timeout_ms * UINT64_C(1000000);
    struct timespec deadline = {.tv_sec = (time_t)(until_ns / UINT64_C(1000000000)),
                                .tv_nsec = (long)(until_ns % UINT64_C(1000000000))};
    int rc = 0;
    atomic_fetch_add(&engine->waiting, 1);
    pthread_mutex_lock(&engine->shared.mutex);
    bool done = is_done(engine, argument);
    while (!done && !atomic_load(&engine->failed) && rc == 0) {
        rc = pthread_cond_timedwait(&engine->shared.changed, &engine->shared.mutex, &deadline);
        done = is_done(engine, argument);
    }
    pthread_mutex_unlock(&engine->shared.mutex);
    atomic_fetch_sub(&engine->waiting, 1);
    if (done)
        return 1;
    return atomic_load(&engine->failed) ? fail_code(engine) : 0;
}

int lh_engine_begin(struct lh_engine *engine, enum lh_engine_mode mode)
{
    if (atomic_load(&engine->failed))
        return fail_code(engine);
    post(engine, LH_MESSAGE_BEGIN, mode, 0, 0);
    return 0;
}

int lh_engine_acquire(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    if (atomic_load(&engine->failed))
        return fail_code(engine);
    bool may_be_updated = unit->gradient_step != unit->asked_step;
    if (may_be_updated && unit->gradient_step < engine->open_step)
        unit->asked_step = unit->gradient_step;
    uint32_t word = may_be_updated ? 0 : atomic_load(&unit->word);
    while (word & LH_UNIT_READY_BIT) {
        if (!atomic_compare_exchange_weak(&unit->word, &word, word + 1))
            continue;
        if ((word & ~LH_UNIT_READY_BIT) == 0)
            post(engine, LH_MESSAGE_USE, index, 0, 0);
        return 1;
    }
    post(engine, LH_MESSAGE_ACQUIRE, index, 0, 0);
    return 0;
}

static bool grant_take(struct lh_engine *engine, uint64_t index)
{
    struct lh_unit *unit = &engine->units[index];
    uint32_t grants = atomic_load(&unit->grants);
    while (grants > 0) {
        if (atomic_compare_exchange_weak(&unit->grants, &grants, grants - 1))
            return true;
    }
    return false;
}

int lh_engine_acquire_wait(struct lh_engine *engine, uint32_t index, int timeout_ms)
{
    LH_ASSERT(index < engine->opts.unit_count);
    uint64_t start = lh_engine_now(engine);
    int rc = wait_until(engine, grant_take, index, timeout_ms);
    post(engine, LH_MESSAGE_WAITED, index, start, lh_engine_now(engine));
    return rc;
}

uint8_t *lh_engine_address(const struct lh_engine *engine, uint32_t unit)
{
    LH_ASSERT(unit < engine->opts.unit_count);
    return engine->region + engine->units[unit].offset;
}

void lh_engine_pin(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    uint32_t before = atomic_fetch_add(&unit->word, 1);
    LH_ASSERT((before & LH_UNIT_READY_BIT) && (before & ~LH_UNIT_READY_BIT) > 0);
}

void lh_engine_unpin(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    uint32_t before = atomic_fetch_sub(&unit->word, 1);
    LH_ASSERT((before & ~LH_UNIT_READY_BIT) > 0);
    if ((before & ~LH_UNIT_READY_BIT) == 1)
        post(engine, LH_MESSAGE_RELEASE, index, 0, 0);
}

uint32_t lh_engine_pin_count(const struct lh_engine *engine, uint32_t unit)
{
    LH_ASSERT(unit < engine->opts.unit_count);
    return lh_unit_pins(&engine->units[unit]);
}

void lh_engine_handle_add(struct lh_engine *engine, uint32_t unit)
{
    atomic_fetch_add(&lh_engine_unit_at(engine, unit)->handles, 1);
}

void lh_engine_handle_drop(struct lh_engine *engine, uint32_t index)
{
    uint32_t before = atomic_fetch_sub(&lh_engine_unit_at(engine, index)->handles, 1);
    LH_ASSERT(before > 0);
    if (before == 1)
        post(engine, LH_MESSAGE_HANDLES, index, 0, 0);
}

uint32_t lh_engine_handle_count(const struct lh_engine *engine, uint32_t unit)
{
    LH_ASSERT(unit < engine->opts.unit_count);
    return atomic_load(&engine->units[unit].handles);
}

void lh_engine_hyper_set(struct lh_engine *engine, uint32_t group,
                         const struct lh_adam_hyper *hyper)
{
    LH_ASSERT(group < engine->opts.group_count);
    engine->hypers[(atomic_load(&engine->closes_asked) + engine->first_step + 1) % 2][group] =
        *hyper;
}

static bool steps_are_over(struct lh_engine *engine, uint64_t argument)
{
    (void)argument;
    return atomic_load(&engine->closes_done) == atomic_load(&engine->closes_asked);
}

/* And so is a flush whose caller gave up: it may be committing, with the scalars of a close. */
static bool all_is_over(struct lh_engine *engine, uint64_t argument)
{
    return steps_are_over(engine, argument) &&
           atomic_load(&engine->flushes_done) == atomic_load(&engine->flushes_asked);
}

int lh_engine_over_wait(struct lh_engine *engine, int timeout_ms)
{
    if (all_is_over(engine, 0))
        return 1;
    return wait_until(engine, all_is_over, 0, timeout_ms);
}

int lh_engine_gradient(struct lh_engine *engine, uint32_t param, const void *gradient,
                       enum lh_dtype dtype)
{
    LH_ASSERT(param < engine->param_count && steps_are_over(engine, 0));
    LH_ASSERT(dtype == LH_DTYPE_F32 || dtype == LH_DTYPE_BF16);
    if (atomic_load(&engine->failed))
        return fail_code(engine);
    if (engine->units[engine->params[param].unit].desc.elements == 0)
        return -EINVAL;
    if (engine->gradient_steps[param] == engine->open_step)
        return -EALREADY;
    engine->gradient_steps[param] = engine->open_step;
    engine->units[engine->params[param].unit].gradient_step = engine->open_step;
    atomic_store(&engine->gradients[param].is_held, true);
    post(engine, LH_MESSAGE_GRADIENT, param, (uint64_t)(uintptr_t)gradient, dtype);
    return 0;
}

bool lh_engine_gradient_is_consumed(const struct lh_engine *engine, uint32_t param)
{
    LH_ASSERT(param < engine->param_count);
    return !atomic_load(&engine->gradients[param].is_held);
}

static bool gradients_fit(struct lh_engine *engine, uint64_t bytes_max)
{
    return atomic_load(&engine->update_gradient_bytes) <= bytes_max;
}

int lh_engine_gradient_wait(struct lh_engine *engine, uint64_t gradient_bytes_max, int timeout_ms)
{
    if (gradients_fit(engine, gradient_bytes_max))
        return 1;
    uint64_t start = lh_engine_now(engine);
    int rc = wait_until(engine, gradients_fit, gradient_bytes_max, timeout_ms);
    post(engine, LH_MESSAGE_WAITED, LH_CHUNK_NONE, start, lh_engine_now(engine));
    return rc;
}

int lh_engine_close(struct lh_engine *engine, const void *scalars, uint64_t scalar_bytes,
                    int timeout_ms)
{
    int rc = lh_engine_over_wait(engine, timeout_ms);
    if (rc <= 0)
        return rc;
    if (atomic_load(&engine->failed))
        return fail_code(engine);
    uint64_t overhead = lh_engine_scalar_overhead_bytes(engine->param_count);
    if (scalar_bytes > engine->scalar_bytes_max - overhead)
        return -E2BIG;
    /* The step before is over, so no commit reads these. */
    memcpy(engine->scalars + overhead, scalars, scalar_bytes);
    atomic_fetch_add(&engine->closes_asked, 1);
    engine->open_step++;
    post(engine, LH_MESSAGE_CLOSE, 0, overhead + scalar_bytes, 0);
    return 1;
}

static bool abort_is_done(struct lh_engine *engine, uint64_t argument)
{
    return atomic_load(&engine->aborts_done) >= argument;
}

int lh_engine_abort(struct lh_engine *engine, int timeout_ms)
{
    int rc = lh_engine_over_wait(engine, timeout_ms);
    if (rc <= 0)
        return rc;
    uint64_t asked = atomic_load(&engine->aborts_asked);
    if (atomic_load(&engine->aborts_done) == asked) {
        asked = atomic_fetch_add(&engine->aborts_asked, 1) + 1;
        post(engine, LH_MESSAGE_ABORT, 0, 0, 0);
    }
    rc = wait_until(engine, abort_is_done, asked, timeout_ms);
    if (rc <= 0)
        return rc;
    engine->open_step++;
    return atomic_load(&engine->abort_result) < 0 ? atomic_load(&engine->abort_result) : 1;
}

static bool flush_is_done(struct lh_engine *engine, uint64_t argument)
{
    return atomic_load(&engine->flushes_done) >= argument;
}

int lh_engine_flush(struct lh_engine *engine, bool commit, int timeout_ms)
{
    int rc = wait_until(engine, steps_are_over, 0, timeout_ms);
    if (rc <= 0)
        return rc;
    if (atomic_load(&engine->failed))
        return fail_code(engine);
    uint64_t asked = atomic_load(&engine->flushes_asked);
    if (commit && !engine->flush_asked_commits) {
        /* One that somebody gave up does not commit: it is not this one. */
        rc = wait_until(engine, flush_is_done, asked, timeout_ms);
        if (rc <= 0)
            return rc;
    }
    if (atomic_load(&engine->flushes_done) == asked) {
        engine->flush_asked_commits = commit;
        asked = atomic_fetch_add(&engine->flushes_asked, 1) + 1;
        post(engine, LH_MESSAGE_FLUSH, commit, 0, 0);
    }
    return wait_until(engine, flush_is_done, asked, timeout_ms);
}

static bool pause_is_done(struct lh_engine *engine, uint64_t argument)
{
    (void)argument;
    return engine->shared.is_paused;
}

int lh_engine_pause(struct lh_engine *engine, int timeout_ms)
{
    atomic_store(&engine->pausing, true);
    lh_waker_wake(engine->waker);
    return wait_until(engine, pause_is_done, 0, timeout_ms);
}

void lh_engine_invalidate(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    LH_ASSERT(engine->shared.is_paused);
    lh_update_forget_unit(engine, index);
    if (unit->state == LH_UNIT_STATE_READY)
        lh_unit_forget(engine, index);
    lh_unit_prediction_forget(engine);
}

void lh_engine_resume(struct lh_engine *engine)
{
    pthread_mutex_lock(&engine->shared.mutex);
    atomic_store(&engine->pausing, false);
    pthread_cond_broadcast(&engine->shared.changed);
    pthread_mutex_unlock(&engine->shared.mutex);
}

uint64_t lh_engine_step(const struct lh_engine *engine)
{
    return engine->first_step + atomic_load(&engine->closes_asked);
}

uint64_t lh_engine_param_step(const struct lh_engine *engine, uint32_t param)
{
    LH_ASSERT(param < engine->param_count);
    return engine->param_steps[param];
}

bool lh_engine_stats(struct lh_engine *engine, struct lh_engine_step_stats *stats_out)
{
    pthread_mutex_lock(&engine->shared.mutex);
    bool has = engine->shared.has_finished;
    *stats_out = engine->shared.finished;
    pthread_mutex_unlock(&engine->shared.mutex);
    return has;
}
