/*
 * Test what engine.h says of threads and waits: calls that any thread may make, calls that are
 * polled with a timeout of 0, a pause, a stop while requests are in flight, and waits that are
 * always woken.
 */
#include <pthread.h>

#include "base/thread.h"
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define THREAD_COUNT 4
#define LONG_MS (RIG_WAIT_S * 1000)

static struct rig_opts opts_of(enum lh_engine_schedule schedule, bool least_memory)
{
    return (struct rig_opts){.in_memory = true,
                             .schedule = schedule,
                             .least_memory = least_memory,
                             .plain_gradients = true,
                             .commit_every = 1};
}

/* Hold back all reads but the next ones. The engine is paused, so nothing else uses the I/O. */
static void reads_hold(struct rig *rig, uint64_t after)
{
    lh_io_faulty_arm(rig->io, (struct lh_io_fault){.kind = LH_IO_FAULT_KIND_HOLD,
                                                   .request_kinds = LH_IO_FAULT_ON(LH_IO_KIND_READ),
                                                   .after = after});
}

/* Use one unit after another until a read is held back. */
static void reads_begin(struct rig *rig)
{
    LH_CHECK(lh_engine_begin(rig->engine, LH_ENGINE_MODE_EVAL) == 0);
    rig_wait_begin(rig);
    for (uint32_t i = 0; rig_waits(rig, lh_io_faulty_has_fired(rig->io)); i++) {
        uint32_t unit = i % RIG_UNIT_COUNT;
        int rc = lh_engine_acquire(rig->engine, unit);
        while (rig_waits(rig, rc == 1 || lh_io_faulty_has_fired(rig->io)))
            rc = lh_engine_acquire_wait(rig->engine, unit, 5);
        if (rc == 1)
            lh_engine_unpin(rig->engine, unit);
    }
}

/* --- Calls of several threads ----------------------------------------------------------------- */

struct caller {
    pthread_t thread;
    struct rig *rig;
    uint32_t index;
    int result;
};

static void callers_run(struct rig *rig, struct caller *callers, uint32_t count,
                        void *(*run)(void *context))
{
    for (uint32_t i = 0; i < count; i++) {
        callers[i] = (struct caller){.rig = rig, .index = i};
        LH_CHECK(lh_thread_start(&callers[i].thread, NULL, run, &callers[i]) == 0);
    }
}

static void callers_join(struct caller *callers, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        LH_CHECK(pthread_join(callers[i].thread, NULL) == 0);
}

/* Use a lend and a handle as autograd's threads do. */
static void *lends_run(void *context)
{
    struct caller *caller = context;
    struct lh_engine *engine = caller->rig->engine;
    for (int i = 0; i < 500; i++) {
        lh_engine_pin(engine, 3);
        lh_engine_handle_add(engine, 3);
        LH_CHECK(lh_engine_address(engine, 3) != NULL && lh_engine_error(engine, NULL) == 0);
        lh_engine_unpin(engine, 3);
        lh_engine_handle_drop(engine, 3);
    }
    lh_engine_unpin(engine, 3); /* drop the thread's own pin, which the test has added */
    lh_engine_handle_drop(engine, 3);
    return NULL;
}

static void test_lends(void)
{
    struct rig rig;
    struct caller callers[THREAD_COUNT];
    lh_test_name("pins and handles that several threads add and drop are all counted, and the "
                 "update begins after the last of them");
    rig_make(&rig, "threads-lends", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED, false));
    for (int round = 0; round < 3; round++) {
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
        LH_CHECK(rig_acquire(&rig, 3) == 0);
        for (int i = 0; i < THREAD_COUNT; i++) {
            lh_engine_pin(rig.engine, 3);
            lh_engine_handle_add(rig.engine, 3);
        }
        lh_engine_unpin(rig.engine, 3);
        LH_CHECK(rig_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(lh_engine_pin_count(rig.engine, 3) == THREAD_COUNT);
        LH_CHECK(lh_engine_handle_count(rig.engine, 3) == THREAD_COUNT);
        callers_run(&rig, callers, THREAD_COUNT, lends_run);
        callers_join(callers, THREAD_COUNT);
        LH_CHECK(lh_engine_pin_count(rig.engine, 3) == 0);
        LH_CHECK(lh_engine_handle_count(rig.engine, 3) == 0);
        /* Its update needs nothing else, so it ends before the close. */
        rig_wait_begin(&rig);
        while (rig_waits(&rig, lh_engine_gradient_is_consumed(rig.engine, 5)))
            usleep(1000);
        LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_over_as_planned(&rig);
    }
    rig_finish(&rig);
}

static void *backward_run(void *context)
{
    struct caller *caller = context;
    caller->result = rig_backward(caller->rig, RIG_GRADIENTS_ALL);
    return NULL;
}

static void test_backward_elsewhere(void)
{
    struct rig rig;
    struct caller caller;
    lh_test_name("a backward on another thread than its forward and its close gives the same bits");
    rig_make(&rig, "threads-backward", opts_of(LH_ENGINE_SCHEDULE_DEFERRED, true));
    for (int i = 0; i < 4; i++) {
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
        callers_run(&rig, &caller, 1, backward_run);
        callers_join(&caller, 1);
        LH_CHECK(caller.result == 0 && rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
    }
    rig_finish(&rig);
}

/* --- Timeouts --------------------------------------------------------------------------------- */

static int poll_acquire(struct rig *rig)
{
    return lh_engine_acquire_wait(rig->engine, 5, 0);
}

static int poll_over(struct rig *rig)
{
    return lh_engine_over_wait(rig->engine, 0);
}

static int poll_gradient(struct rig *rig)
{
    return lh_engine_gradient_wait(rig->engine, 0, 0);
}

static int poll_close(struct rig *rig)
{
    return lh_engine_close(rig->engine, "", 0, 0);
}

static int poll_flush(struct rig *rig)
{
    return lh_engine_flush(rig->engine, true, 0);
}

static int poll_abort(struct rig *rig)
{
    return lh_engine_abort(rig->engine, 0);
}

static int poll_hold(struct rig *rig)
{
    return lh_engine_commit_hold(rig->engine, 0);
}

static int poll_pause(struct rig *rig)
{
    return lh_engine_pause(rig->engine, 0);
}

static void poll(struct rig *rig, int (*call)(struct rig *rig))
{
    int rc = 0;
    rig_wait_begin(rig);
    while (rig_waits(rig, rc = call(rig)))
        usleep(200);
    LH_CHECK(rc == 1);
}

/* The first poll comes before the engine may do anything about the request. */
static void poll_early(struct rig *rig, int (*call)(struct rig *rig))
{
    rig_pause(rig);
    LH_CHECK(call(rig) == 0);
    lh_engine_resume(rig->engine);
    poll(rig, call);
}

static uint64_t sent_count(const struct rig *rig, enum lh_request_kind kind)
{
    return atomic_load(&rig->engine->requests[kind].sent);
}

static void test_polled(void)
{
    struct rig rig;
    lh_test_name("every call that waits can be polled with a timeout of 0, and is one request");
    rig_make(&rig, "threads-polled", opts_of(LH_ENGINE_SCHEDULE_DEFERRED, true));
    for (uint64_t i = 0; i < 3; i++) {
        LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
        if (lh_engine_acquire(rig.engine, 5) == 0)
            poll(&rig, poll_acquire);
        lh_engine_unpin(rig.engine, 5);
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        poll(&rig, poll_over);
        LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        poll(&rig, poll_gradient);
        poll_early(&rig, poll_abort);
        LH_CHECK(sent_count(&rig, LH_REQUEST_ABORT) == i + 1);
        LH_CHECK(rig_forward_backward(&rig, 0) == 0);
        poll(&rig, poll_close);
        rig.step++; /* a step without gradients leaves the values unchanged */
        memcpy(rig.snapshots[rig.step] = malloc(rig.state_bytes), rig.state, rig.state_bytes);
        poll_early(&rig, poll_flush);
        LH_CHECK(sent_count(&rig, LH_REQUEST_FLUSH) == i + 1);
        poll_early(&rig, poll_hold);
        LH_CHECK(sent_count(&rig, LH_REQUEST_HOLD) == i + 1);
        lh_engine_commit_release(rig.engine);
        poll(&rig, poll_pause);
        lh_engine_resume(rig.engine);
    }
    rig_finish(&rig);
}

/* --- Pause and stop --------------------------------------------------------------------------- */

static void test_pause(void)
{
    struct rig rig;
    lh_test_name("a pause waits for what is in flight, nothing moves until it is resumed, and what "
                 "was asked for meanwhile is done then");
    rig_make(&rig, "threads-pause", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED, true));
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_flush(&rig, true) == 0);
    rig_pause(&rig);
    reads_hold(&rig, 0);
    LH_CHECK(lh_engine_pause(rig.engine, 0) == 1); /* the engine is still paused */
    lh_engine_resume(rig.engine);
    reads_begin(&rig);
    for (int i = 0; i < 5; i++)
        LH_CHECK(lh_engine_pause(rig.engine, 10) == 0);
    lh_io_faulty_release(rig.io);
    rig_pause(&rig);
    uint64_t trace_written = rig.engine->trace_written;
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        int rc = lh_engine_acquire(rig.engine, i);
        if (rc == 0)
            rc = lh_engine_acquire_wait(rig.engine, i, 5);
        LH_CHECK(rig.engine->trace_written == trace_written);
        if (rc == 0)
            break; /* the unit is absent, and is not being read */
        LH_CHECK(rc == 1);
        lh_engine_unpin(rig.engine, i);
    }
    lh_engine_resume(rig.engine);
    rig_shut(&rig);
    rig_reopen(&rig);
    LH_CHECK(rig.step == 1);
    rig_finish(&rig);
}

static void *stop_run(void *context)
{
    struct caller *caller = context;
    lh_engine_stop(caller->rig->engine);
    return NULL;
}

static void test_stop(uint64_t after, bool in_update)
{
    struct rig rig;
    struct caller caller;
    lh_test_name("a stop waits for requests in flight, whose buffers it gives back, and every call "
                 "after it is refused (%s, after %d reads)",
                 in_update ? "in an update" : "in a forward", (int)after);
    rig_make(&rig, "threads-stop", opts_of(LH_ENGINE_SCHEDULE_DEFERRED, true));
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_flush(&rig, true) == 0);
    if (in_update) {
        LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(rig_flush(&rig, false) == 0);
    }
    rig_pause(&rig);
    reads_hold(&rig, after);
    lh_engine_resume(rig.engine);
    if (in_update) {
        LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(lh_engine_over_wait(rig.engine, 0) == 0);
    } else {
        reads_begin(&rig);
    }
    rig_wait_begin(&rig);
    while (rig_waits(&rig, lh_io_faulty_has_fired(rig.io)))
        usleep(200);
    callers_run(&rig, &caller, 1, stop_run);
    rig_wait_begin(&rig);
    while (rig_waits(&rig, atomic_load(&rig.engine->stopping)))
        usleep(200);
    lh_io_faulty_release(rig.io);
    callers_join(&caller, 1);
    LH_CHECK(rig.engine->transfers.in_flight == 0 && rig.engine->jobs_in_flight == 0);
    LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == -ECANCELED);
    LH_CHECK(lh_engine_acquire(rig.engine, 5) == -ECANCELED);
    LH_CHECK(lh_engine_acquire_wait(rig.engine, 5, LONG_MS) == -ECANCELED);
    LH_CHECK(lh_engine_flush(rig.engine, true, LONG_MS) == -ECANCELED);
    LH_CHECK(lh_engine_commit_hold(rig.engine, LONG_MS) == -ECANCELED);
    rig_shut(&rig);
    rig_reopen(&rig);
    LH_CHECK(rig.step == 1 && rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_finish(&rig);
}

/* --- Waking ----------------------------------------------------------------------------------- */

static void test_wakeups(void)
{
    const int round_count = LH_TEST_IS_SLOW ? 20 : 100;
    struct rig rig;
    lh_test_name("no wait runs into its timeout, of a minute, in many short rounds");
    rig_make(&rig, "threads-wakeups", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED, true));
    for (int i = 0; i < round_count; i++) {
        LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
        for (uint32_t j = 0; j < RIG_UNIT_COUNT; j++) {
            int rc = lh_engine_acquire(rig.engine, j);
            LH_CHECK(rc == 1 || lh_engine_acquire_wait(rig.engine, j, LONG_MS) == 1);
            lh_engine_unpin(rig.engine, j);
        }
        LH_CHECK(lh_engine_flush(rig.engine, false, LONG_MS) == 1);
        LH_CHECK(lh_engine_pause(rig.engine, LONG_MS) == 1);
        lh_engine_resume(rig.engine);
        LH_CHECK(lh_engine_commit_hold(rig.engine, LONG_MS) == 1);
        lh_engine_commit_release(rig.engine);
        LH_CHECK(lh_engine_abort(rig.engine, LONG_MS) == 1);
        LH_CHECK(lh_engine_over_wait(rig.engine, LONG_MS) == 1);
    }
    rig_unmake(&rig);
}

static void test_no_room(void)
{
    struct rig rig;
    struct lh_error err = {0};
    uint32_t pinned_count = 0;
    lh_test_name("a unit for which pinned ones leave no room is refused with the numbers; when one "
                 "is unpinned it is granted, and training continues");
    rig_make(&rig, "threads-room", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED, true));
    LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
    int rc = 0;
    for (; pinned_count < RIG_UNIT_COUNT; pinned_count++) {
        rc = lh_engine_acquire(rig.engine, pinned_count);
        if (rc == 0)
            rc = lh_engine_acquire_wait(rig.engine, pinned_count, LONG_MS);
        if (rc != 1)
            break;
    }
    LH_CHECK(rc == -ENOSPC && pinned_count >= 3 && lh_engine_error(rig.engine, NULL) == 0);
    lh_engine_refusal(rig.engine, &err);
    char text[64];
    snprintf(text, sizeof(text),
             "unit %u needs %" PRIu64 " bytes in one piece, and %u units in use", pinned_count,
             rig.units[pinned_count].bytes, pinned_count);
    LH_CHECK(err.code == -ENOSPC && strstr(err.message, text));
    for (uint32_t i = 0; i < pinned_count; i++)
        lh_engine_unpin(rig.engine, i);
    LH_CHECK(rig_acquire(&rig, pinned_count) == 0);
    lh_engine_unpin(rig.engine, pinned_count);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_finish(&rig);
}

int main(void)
{
    test_lends();
    test_backward_elsewhere();
    test_polled();
    test_pause();
    for (uint64_t after = 0; after < 3; after++) {
        test_stop(after, false);
        test_stop(after, true);
    }
    test_wakeups();
    test_no_room();
    return 0;
}
