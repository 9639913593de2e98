/* The functions of engine.h that other threads call: they post messages to the engine, and wait. */
#include <string.h>
#include <time.h>

#include "sched/engine_private.h"

int lh_engine_error(struct lh_engine *engine, struct lh_error *err)
{
    return lh_core_error(engine, err);
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

void lh_engine_post(struct lh_engine *engine, enum lh_message_kind kind, uint64_t a, uint64_t b,
                    uint64_t c)
{
    struct lh_ring_message message = {.words = {kind, a, b, c}};
    LH_ASSERT(kind >= LH_MESSAGE_BEGIN && kind <= LH_MESSAGE_ANNOUNCED);
    if (lh_core_is_forked(engine))
        return;
    atomic_fetch_add(&engine->post_count, 1);
    while (!lh_ring_push(&engine->inbox, message)) {
        if (atomic_load(&engine->failed) || atomic_load(&engine->stopping))
            return;
        lh_waker_wake(engine->waker);
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    lh_waker_wake(engine->waker);
}

/* Returns 1 when is_done(argument) is true, 0 after timeout_ms, or -errno if the engine failed. */
int lh_engine_wait_until(struct lh_engine *engine, lh_wait_fn is_done, uint64_t argument,
                         int timeout_ms)
{
    if (lh_core_is_forked(engine))
        return -ECANCELED;
    /* The condition variable uses CLOCK_MONOTONIC, whatever clock the engine itself was given. */
    struct lh_clock clock = lh_clock_real();
    uint64_t until_ns = lh_clock_now_ns(&clock) + (uint64_t)timeout_ms * UINT64_C(1000000);
    struct timespec deadline = {.tv_sec = (time_t)(until_ns / UINT64_C(1000000000)),
                                .tv_nsec = (long)(until_ns % UINT64_C(1000000000))};
    int rc = 0;
    atomic_fetch_add(&engine->waiting, 1);
    /* Wake the engine, which may sleep although nothing can end this wait: see engine.c. */
    lh_waker_wake(engine->waker);
    pthread_mutex_lock(&engine->shared.mutex);
    bool done = is_done(engine, argument);
    while (!done && !atomic_load(&engine->failed) && rc == 0) {
        rc = pthread_cond_timedwait(&engine->shared.changed, &engine->shared.mutex, &deadline);
        done = is_done(engine, argument);
    }
    pthread_mutex_unlock(&engine->shared.mutex);
    uint32_t waiting = atomic_fetch_sub(&engine->waiting, 1);
    LH_ASSERT(waiting > 0);
    if (done)
        return 1;
    return atomic_load(&engine->failed) ? lh_core_fail_code(engine) : 0;
}

int lh_engine_begin(struct lh_engine *engine, enum lh_engine_mode mode)
{
    LH_ASSERT((uint32_t)mode < LH_ENGINE_MODE_COUNT);
    if (atomic_load(&engine->failed))
        return lh_core_fail_code(engine);
    lh_engine_post(engine, LH_MESSAGE_BEGIN, mode, 0, 0);
    return 0;
}

void lh_engine_announce(struct lh_engine *engine, const uint32_t *units, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        LH_ASSERT(units[i] < engine->opts.unit_count);
        lh_engine_post(engine, LH_MESSAGE_ANNOUNCED, units[i], i, i + 1 == count);
    }
}

void *lh_engine_stream_set(struct lh_engine *engine, void *stream)
{
    return atomic_exchange(&engine->stream, stream);
}

/*
 * Make the current stream wait for the unit's copy before any work that it is given from now on.
 * Returns 1 or -errno.
 */
static int arrival_wait(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(lh_unit_pins(unit) > 0); /* the caller holds a pin */
    if (!engine->copies_units)
        return 1;
    int rc = lh_stream_wait(engine, unit->copy.arrived, (uint32_t)(unit - engine->units),
                            "waiting for a unit's copy");
    return rc == 0 ? 1 : rc;
}

int lh_engine_acquire(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    if (atomic_load(&engine->failed))
        return lh_core_fail_code(engine);
    LH_ASSERT(unit->caller.asked_step <= unit->caller.gradient_step);
    LH_ASSERT(unit->caller.gradient_step <= engine->open_step);
    bool may_be_updated = unit->caller.gradient_step != unit->caller.asked_step;
    if (may_be_updated && unit->caller.gradient_step < engine->open_step)
        unit->caller.asked_step = unit->caller.gradient_step;
    /* The engine knows whether a unit of a family owes updates (idle.h). */
    bool must_ask = may_be_updated || unit->desc->family > 0;
    uint32_t word = must_ask ? 0 : atomic_load(&unit->shared.word);
    while (word & LH_UNIT_READY_BIT) {
        if (!atomic_compare_exchange_weak(&unit->shared.word, &word, word + 1))
            continue;
        if ((word & ~LH_UNIT_READY_BIT) == 0)
            lh_engine_post(engine, LH_MESSAGE_USE, index, 0, 0);
        return arrival_wait(engine, unit);
    }
    lh_engine_post(engine, LH_MESSAGE_ACQUIRE, index, 0, 0);
    return 0;
}

static bool take_one(_Atomic uint32_t *count)
{
    uint32_t left = atomic_load(count);
    while (left > 0) {
        if (atomic_compare_exchange_weak(count, &left, left - 1))
            return true;
    }
    return false;
}

struct answer {
    uint32_t unit;
    bool is_refused;
};

static bool answer_take(struct lh_engine *engine, uint64_t argument)
{
    struct answer *answer = (struct answer *)(uintptr_t)argument;
    struct lh_unit *unit = &engine->units[answer->unit];
    if (take_one(&unit->shared.grants))
        return true;
    answer->is_refused = take_one(&unit->shared.refusals);
    return answer->is_refused;
}

void lh_engine_refusal(struct lh_engine *engine, struct lh_error *err)
{
    pthread_mutex_lock(&engine->shared.mutex);
    *err = engine->shared.refusal;
    pthread_mutex_unlock(&engine->shared.mutex);
}

int lh_engine_acquire_wait(struct lh_engine *engine, uint32_t index, int timeout_ms)
{
    LH_ASSERT(index < engine->opts.unit_count);
    /* A unit that was granted while the engine failed must not be used. */
    if (atomic_load(&engine->failed))
        return lh_core_fail_code(engine);
    struct answer answer = {.unit = index};
    struct lh_dev_gap *gap = NULL;
    LH_FEATURE_CALL(engine, wait_begun, &gap);
    uint64_t start = lh_core_now(engine);
    int rc = lh_engine_wait_until(engine, answer_take, (uint64_t)(uintptr_t)&answer, timeout_ms);
    LH_FEATURE_CALL(engine, wait_ended, gap, true);
    if (rc == 1 && answer.is_refused)
        return -ENOSPC;
    lh_engine_post(engine, LH_MESSAGE_WAITED, index, start, lh_core_now(engine));
    return rc == 1 ? arrival_wait(engine, &engine->units[index]) : rc;
}

void lh_engine_tentative_begin(struct lh_engine *engine)
{
    atomic_fetch_add(&engine->tentative, 1);
}

void lh_engine_tentative_end(struct lh_engine *engine)
{
    uint32_t before = atomic_fetch_sub(&engine->tentative, 1);
    LH_ASSERT(before > 0);
    /* Wake the engine, which may sleep although a thread waits for a unit that must be refused. */
    lh_waker_wake(engine->waker);
}

uint8_t *lh_engine_address(const struct lh_engine *engine, uint32_t unit)
{
    LH_ASSERT(unit < engine->opts.unit_count);
    if (engine->copies_units)
        return engine->opts.device_memory + engine->units[unit].copy.offset;
    if (engine->dev)
        return engine->opts.device_memory + engine->units[unit].offset;
    return engine->units[unit].memory;
}

void lh_engine_pin(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    uint32_t before = atomic_fetch_add(&unit->shared.word, 1);
    LH_ASSERT((before & LH_UNIT_READY_BIT) && (before & ~LH_UNIT_READY_BIT) > 0);
}

void lh_engine_unpin(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    /* Record the fence first: once no pin is left, the engine may reuse the unit's place. */
    lh_stream_record(engine, unit->copy.released);
    uint32_t before = atomic_fetch_sub(&unit->shared.word, 1);
    LH_ASSERT((before & ~LH_UNIT_READY_BIT) > 0);
    if ((before & ~LH_UNIT_READY_BIT) == 1)
        lh_engine_post(engine, LH_MESSAGE_RELEASE, index, 0, 0);
}

uint32_t lh_engine_pin_count(const struct lh_engine *engine, uint32_t unit)
{
    LH_ASSERT(unit < engine->opts.unit_count);
    return lh_unit_pins(&engine->units[unit]);
}

struct lh_engine_bytes lh_engine_bytes(const struct lh_engine *engine, uint32_t index)
{
    LH_ASSERT(index < engine->opts.unit_count);
    const struct lh_unit *unit = &engine->units[index];
    return (struct lh_engine_bytes){
        .address = lh_engine_address(engine, index),
        .make_count =
            atomic_load(engine->copies_units ? &unit->copy.copy_count : &unit->shared.load_count),
        .out_count = atomic_load(&unit->copy.out_count),
        .is_from_write_back = atomic_load(&unit->copy.is_from_write_back),
    };
}

void lh_engine_moved(struct lh_engine *engine, uint32_t unit)
{
    LH_ASSERT(unit < engine->opts.unit_count);
    if (engine->copies_units)
        atomic_store(&lh_engine_unit_at(engine, unit)->copy.is_modified, true);
}

void lh_engine_handle_add(struct lh_engine *engine, uint32_t unit)
{
    uint32_t before = atomic_fetch_add(&lh_engine_unit_at(engine, unit)->shared.handles, 1);
    LH_ASSERT(before < UINT32_MAX);
}

void lh_engine_handle_drop(struct lh_engine *engine, uint32_t index)
{
    uint32_t before = atomic_fetch_sub(&lh_engine_unit_at(engine, index)->shared.handles, 1);
    LH_ASSERT(before > 0);
    if (before == 1)
        lh_engine_post(engine, LH_MESSAGE_HANDLES, index, 0, 0);
}

uint32_t lh_engine_handle_count(const struct lh_engine *engine, uint32_t unit)
{
    LH_ASSERT(unit < engine->opts.unit_count);
    return atomic_load(&engine->units[unit].shared.handles);
}

void lh_engine_hyper_set(struct lh_engine *engine, uint32_t group,
                         const struct lh_adam_hyper *hyper)
{
    LH_ASSERT(group < engine->opts.group_count);
    engine->hypers[(lh_engine_step(engine) + 1) % 2][group] = *hyper;
}

static bool steps_are_over(struct lh_engine *engine, uint64_t argument)
{
    (void)argument;
    return !lh_request_is_pending(&engine->requests[LH_REQUEST_CLOSE]) &&
           !atomic_load(&engine->is_reopened);
}

bool lh_engine_is_reopened(const struct lh_engine *engine)
{
    return atomic_load(&engine->is_reopened);
}

/*
 * Whether all steps are over, and no flush, abort or repetition is pending whose caller was
 * interrupted (such a flush may be committing the scalars of a close).
 */
static bool all_is_over(struct lh_engine *engine, uint64_t argument)
{
    return steps_are_over(engine, argument) &&
           !lh_request_is_pending(&engine->requests[LH_REQUEST_FLUSH]) &&
           !lh_request_is_pending(&engine->requests[LH_REQUEST_ABORT]) &&
           !lh_request_is_pending(&engine->requests[LH_REQUEST_REPEAT]);
}

int lh_engine_over_wait(struct lh_engine *engine, int timeout_ms)
{
    if (all_is_over(engine, 0))
        return 1;
    if (!steps_are_over(engine, 0))
        lh_engine_post(engine, LH_MESSAGE_DRAIN, 0, 0, 0);
    return lh_engine_room_wait(engine, all_is_over, 0, timeout_ms);
}

int lh_engine_gradient(struct lh_engine *engine, uint32_t param, const void *gradient,
                       enum lh_dtype dtype)
{
    LH_ASSERT(param < engine->param_count);
    LH_ASSERT(!lh_request_is_pending(&engine->requests[LH_REQUEST_CLOSE]));
    LH_ASSERT(dtype <= LH_DTYPE_F16);
    LH_ASSERT(engine->params[param].unit < engine->opts.unit_count);
    LH_ASSERT(engine->gradient_steps[param] <= engine->open_step);
    if (atomic_load(&engine->failed))
        return lh_core_fail_code(engine);
    if (engine->units[engine->params[param].unit].desc->elements == 0)
        return -EINVAL;
    const struct lh_unit *unit = &engine->units[engine->params[param].unit];
    if (lh_engine_gradients_land(engine) && dtype != unit->desc->dtype)
        return -EINVAL;
    if (engine->gradient_steps[param] == engine->open_step)
        return -EALREADY;
    engine->gradient_steps[param] = engine->open_step;
    engine->units[engine->params[param].unit].caller.gradient_step = engine->open_step;
    atomic_store(&engine->gradients[param].is_held, true);
    if (engine->dev)
        lh_stream_record(engine, engine->gradients[param].is_computed);
    lh_engine_post(engine, LH_MESSAGE_GRADIENT, param, (uint64_t)(uintptr_t)gradient, dtype);
    return 0;
}

uint64_t lh_engine_gradient_release_count(const struct lh_engine *engine)
{
    return atomic_load(&engine->gradients_released);
}

bool lh_engine_gradient_is_consumed(const struct lh_engine *engine, uint32_t param)
{
    LH_ASSERT(param < engine->param_count);
    return !atomic_load(&engine->gradients[param].is_held);
}

int lh_engine_room_wait(struct lh_engine *engine, lh_wait_fn is_done, uint64_t argument,
                        int timeout_ms)
{
    struct lh_dev_gap *gap = NULL;
    if (is_done(engine, argument))
        return 1;
    LH_FEATURE_CALL(engine, wait_begun, &gap);
    uint64_t start = lh_core_now(engine);
    int rc = lh_engine_wait_until(engine, is_done, argument, timeout_ms);
    LH_FEATURE_CALL(engine, wait_ended, gap, false);
    lh_engine_post(engine, LH_MESSAGE_WAITED, LH_CHUNK_NONE, start, lh_core_now(engine));
    return rc;
}

bool lh_engine_gradients_fit(const struct lh_engine *engine, uint64_t gradient_bytes_max)
{
    return atomic_load(&engine->update_gradient_bytes) <= gradient_bytes_max;
}

static bool gradients_fit(struct lh_engine *engine, uint64_t bytes_max)
{
    return lh_engine_gradients_fit(engine, bytes_max);
}

int lh_engine_gradient_wait(struct lh_engine *engine, uint64_t gradient_bytes_max, int timeout_ms)
{
    return lh_engine_room_wait(engine, gradients_fit, gradient_bytes_max, timeout_ms);
}

int lh_engine_close(struct lh_engine *engine, const void *scalars, uint64_t scalar_bytes,
                    int timeout_ms)
{
    int rc = lh_engine_over_wait(engine, timeout_ms);
    if (rc <= 0)
        return rc;
    if (atomic_load(&engine->failed))
        return lh_core_fail_code(engine);
    uint64_t overhead = lh_scalars_overhead_bytes(engine->param_count);
    LH_ASSERT(engine->scalar_bytes_max >= overhead); /* lh_engine_create() checked this */
    if (scalar_bytes > engine->scalar_bytes_max - overhead) {
        LH_FEATURE_CALL(engine, close_refused);
        return -E2BIG;
    }
    /* The previous step is over, so no commit is reading engine->scalars. */
    lh_scalars_begin(engine->scalars, engine->param_count, scalar_bytes);
    memcpy(engine->scalars + overhead, scalars, scalar_bytes);
    lh_request_send(engine, LH_REQUEST_CLOSE);
    engine->open_step++;
    lh_engine_post(engine, LH_MESSAGE_CLOSE, 0, overhead + scalar_bytes, 0);
    return 1;
}

void lh_engine_gradient_scale_set(struct lh_engine *engine, double scale)
{
    engine->gradient_scales[(lh_engine_step(engine) + 1) % 2] = scale;
}

void lh_engine_peer_lost(struct lh_engine *engine)
{
    struct lh_error err = {0};
    lh_error_set(&err, -ECONNABORTED,
                 "another process of this machine, whose parameters or memory the engine waited"
                 " for, is gone");
    lh_core_fail(engine, &err);
    lh_waker_wake(engine->waker);
}

int lh_engine_abort(struct lh_engine *engine, int timeout_ms)
{
    if (!lh_request_is_current(engine, LH_REQUEST_ABORT)) {
        int over = lh_engine_over_wait(engine, timeout_ms);
        if (over <= 0)
            return over;
        lh_request_send(engine, LH_REQUEST_ABORT);
        lh_engine_post(engine, LH_MESSAGE_ABORT, 0, 0, 0);
    }
    LH_ASSERT(engine->requests[LH_REQUEST_ABORT].awaited > 0);
    int rc = lh_request_wait(engine, LH_REQUEST_ABORT, timeout_ms);
    if (rc <= 0)
        return rc;
    engine->open_step++;
    int result = atomic_load(&engine->abort_result);
    LH_ASSERT(result <= 0);
    return result < 0 ? result : 1;
}

static int flush_send(struct lh_engine *engine, bool commit, int timeout_ms)
{
    if (!steps_are_over(engine, 0))
        lh_engine_post(engine, LH_MESSAGE_DRAIN, 0, 0, 0);
    int rc = lh_engine_wait_until(engine, steps_are_over, 0, timeout_ms);
    if (rc <= 0)
        return rc;
    if (atomic_load(&engine->failed))
        return lh_core_fail_code(engine);
    lh_request_join(engine, LH_REQUEST_FLUSH);
    if (commit && !engine->flush_requests_commit) {
        /* A pending flush that does not commit cannot replace this one: wait until it is over. */
        rc = lh_request_wait(engine, LH_REQUEST_FLUSH, timeout_ms);
        if (rc <= 0)
            return rc;
    }
    if (lh_request_is_pending(&engine->requests[LH_REQUEST_FLUSH]))
        return 1;
    engine->flush_requests_commit = commit;
    lh_request_send(engine, LH_REQUEST_FLUSH);
    lh_engine_post(engine, LH_MESSAGE_FLUSH, commit, 0, 0);
    return 1;
}

int lh_engine_flush(struct lh_engine *engine, bool commit, int timeout_ms)
{
    bool is_this = engine->flush_requests_commit || !commit;
    if (!is_this || !lh_request_is_current(engine, LH_REQUEST_FLUSH)) {
        int rc = flush_send(engine, commit, timeout_ms);
        if (rc <= 0)
            return rc;
    }
    LH_ASSERT(engine->requests[LH_REQUEST_FLUSH].awaited > 0);
    return lh_request_wait(engine, LH_REQUEST_FLUSH, timeout_ms);
}

int lh_engine_commit_hold(struct lh_engine *engine, int timeout_ms)
{
    if (atomic_load(&engine->failed))
        return lh_core_fail_code(engine);
    if (!atomic_load(&engine->holds_commits)) {
        /* Set this before the request: once the engine has replied, no commit may begin. */
        atomic_store(&engine->holds_commits, true);
        /* A hold that was released before it was granted may still be pending. */
        if (!lh_request_is_pending(&engine->requests[LH_REQUEST_HOLD]))
            lh_request_send(engine, LH_REQUEST_HOLD);
        lh_waker_wake(engine->waker);
    }
    lh_request_join(engine, LH_REQUEST_HOLD);
    return lh_request_wait(engine, LH_REQUEST_HOLD, timeout_ms);
}

void lh_engine_commit_release(struct lh_engine *engine)
{
    atomic_store(&engine->holds_commits, false);
    lh_waker_wake(engine->waker);
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
    return lh_engine_wait_until(engine, pause_is_done, 0, timeout_ms);
}

void lh_engine_invalidate(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    LH_ASSERT(engine->shared.is_paused);
    lh_stream_synchronize(engine); /* the unit's place may be reused at once */
    if (lh_store_is_staged(engine->store, unit->desc->store_group))
        engine->has_edits = true;
    lh_step_forget_unit(engine, index);
    if (unit->state == LH_UNIT_STATE_READY)
        lh_unit_forget(engine, index);
    LH_FEATURE_CALL(engine, unit_forgotten, unit);
    lh_region_forget(engine);
}

static bool is_any_staged(const struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        if (lh_store_is_staged(engine->store, engine->units[i].desc->store_group))
            return true;
    }
    return false;
}

void lh_engine_resume(struct lh_engine *engine)
{
    if (lh_core_is_forked(engine))
        return;
    pthread_mutex_lock(&engine->shared.mutex);
    /* If the caller has committed what was staged, a rollback loses nothing. */
    if (engine->has_edits && engine->shared.is_paused)
        engine->has_edits = is_any_staged(engine);
    atomic_store(&engine->pausing, false);
    pthread_cond_broadcast(&engine->shared.changed);
    pthread_mutex_unlock(&engine->shared.mutex);
}

uint64_t lh_engine_step(const struct lh_engine *engine)
{
    return engine->first_step + atomic_load(&engine->requests[LH_REQUEST_CLOSE].sent);
}

uint64_t lh_engine_param_step(const struct lh_engine *engine, uint32_t param)
{
    LH_ASSERT(param < engine->param_count);
    return engine->param_steps[param];
}

bool lh_engine_stats(struct lh_engine *engine, struct lh_engine_step_stats *stats_out)
{
    if (lh_core_is_forked(engine))
        return false;
    pthread_mutex_lock(&engine->shared.mutex);
    bool has = engine->shared.has_finished;
    *stats_out = engine->shared.finished;
    pthread_mutex_unlock(&engine->shared.mutex);
    return has;
}
