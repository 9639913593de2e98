/*
 * Test deferred updates: none begins before the close, each is over before the next forward reads
 * its unit, they run in the order of that forward, and every wait for the step's end runs the rest.
 */
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

static const struct rig_opts opts_deferred = {
    .manual = true, .in_memory = true, .schedule = LH_ENGINE_SCHEDULE_DEFERRED, .commit_every = 3};

static void rig_make_deferred(struct rig *rig, const char *name)
{
    rig_make(rig, name, opts_deferred);
}

/* Run a forward in a given order, with the handles that its graph keeps. */
static void forward_in(struct rig *rig, const uint32_t *order, uint32_t count)
{
    LH_CHECK(lh_engine_begin(rig->engine, LH_ENGINE_MODE_TRAIN) == 0);
    for (uint32_t i = 0; i < count; i++) {
        LH_CHECK(rig_acquire(rig, order[i]) == 0);
        lh_engine_handle_add(rig->engine, order[i]);
        lh_engine_unpin(rig->engine, order[i]);
    }
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) { /* the units that forward did not use */
        if (lh_engine_handle_count(rig->engine, i) == 0)
            lh_engine_handle_add(rig->engine, i);
    }
}

/* How many deferred units are queued when forward is about to read the one at a position. */
static uint32_t near_count(const struct rig *rig, const uint32_t *order, uint32_t count,
                           uint32_t position)
{
    uint64_t bytes = 0;
    for (uint32_t i = position; i < count; i++) {
        bytes += rig->units[order[i]].bytes;
        if (bytes > rig->budget.region_bytes / 2 && i > position + 1)
            return i;
    }
    return count;
}

static bool is_any_computed(const struct rig *rig, uint64_t step)
{
    for (uint32_t i = 0; i < rig->engine->chunk_count; i++) {
        if (rig->engine->chunks[i].computed_step == step)
            return true;
    }
    return false;
}

static void test_not_before_close(void)
{
    struct rig rig;
    lh_test_name("no update is queued or computed before its step is closed");
    rig_make_deferred(&rig, "defer-close");
    for (int i = 0; i < 3; i++) {
        LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_settle(&rig);
        LH_CHECK(rig.engine->updates.count == 0 && !is_any_computed(&rig, rig.step + 1));
        for (uint32_t j = 0; j < RIG_PARAM_COUNT; j++)
            LH_CHECK(lh_engine_gradient_is_consumed(rig.engine, j) == (j == 4)); /* frozen */
        LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_settle(&rig);
        LH_CHECK(rig.engine->updates.count > 0 && is_any_computed(&rig, rig.step));
        LH_CHECK(rig_over_as_planned(&rig).deferred_units == RIG_UNIT_COUNT - 1);
        for (uint32_t j = 0; j < RIG_PARAM_COUNT; j++)
            LH_CHECK(lh_engine_gradient_is_consumed(rig.engine, j));
    }
    rig_finish(&rig);
}

static void test_order(void)
{
    /* forward does not use unit 3, but it has gradients */
    static const uint32_t used[] = {4, 0, 5, 2, 1};
    static const uint32_t expected[] = {4, 0, 5, 1, 3};
    const uint32_t count = LH_COUNT_OF(expected);
    struct rig rig;
    lh_test_name("updates run in the order in which the closed step's forward used their units, "
                 "each when the next forward comes near; units that it did not use come last");
    rig_make_deferred(&rig, "defer-order");
    forward_in(&rig, used, LH_COUNT_OF(used));
    LH_CHECK(rig_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_settle(&rig);
    const struct lh_updates *updates = &rig.engine->updates;
    LH_CHECK(updates->count == near_count(&rig, expected, count, 0) && updates->count < count);
    LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
    for (uint32_t i = 0; i < count; i++) {
        LH_CHECK(rig_acquire(&rig, expected[i]) == 0); /* the unit has its new bytes */
        rig_settle(&rig);
        uint32_t queued_count = near_count(&rig, expected, count, i + 1);
        /* Once all are queued the step is over, and forgotten. */
        LH_CHECK(updates->count == (queued_count < count ? queued_count : 0));
        lh_engine_unpin(rig.engine, expected[i]);
    }
    LH_CHECK(lh_engine_over_wait(rig.engine, 0) == 1);
    LH_CHECK(updates->predicted_count == count);
    LH_CHECK(memcmp(updates->predicted, expected, sizeof(expected)) == 0);
    rig_finish(&rig);
}

static void test_jump(void)
{
    struct rig rig;
    lh_test_name("a use queues its own unit's update, all before it and those near it, whatever "
                 "forward skipped; a unit without an update queues none");
    rig_make_deferred(&rig, "defer-jump");
    const struct lh_updates *updates = &rig.engine->updates;
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_settle(&rig);
    LH_CHECK(updates->count == 2 && updates->queue[0] == 0 && updates->queue[1] == 1);
    LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
    LH_CHECK(rig_acquire(&rig, 2) == 0); /* frozen */
    lh_engine_unpin(rig.engine, 2);
    rig_settle(&rig);
    LH_CHECK(updates->count == 2);
    LH_CHECK(rig_acquire(&rig, 1) == 0); /* unit 1, but not unit 0 */
    lh_engine_unpin(rig.engine, 1);
    rig_settle(&rig);
    LH_CHECK(updates->count == 4 && updates->queue[2] == 3 && updates->queue[3] == 4);
    LH_CHECK(lh_engine_over_wait(rig.engine, 0) == 0);
    rig_finish(&rig);
}

/* Ways to wait for the end of a step; each returns the engine's immediate reply. */
static int wait_over(struct rig *rig)
{
    return lh_engine_over_wait(rig->engine, 0);
}

static int wait_flush(struct rig *rig)
{
    return lh_engine_flush(rig->engine, false, 0);
}

static int wait_close(struct rig *rig)
{
    return lh_engine_close(rig->engine, "", 0, 0);
}

static int wait_abort(struct rig *rig)
{
    return lh_engine_abort(rig->engine, 0);
}

static void test_waits(void)
{
    static int (*const waits[])(struct rig *rig) = {wait_over, wait_flush, wait_close, wait_abort};
    lh_test_name("a thread that waits for the step's end, however it does, gets all updates queued "
                 "without a forward; without one they wait");
    for (size_t i = 0; i < LH_COUNT_OF(waits); i++) {
        struct rig rig;
        rig_make_deferred(&rig, "defer-waits");
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_settle(&rig);
        LH_CHECK(rig.engine->updates.count < RIG_UNIT_COUNT - 1);
        LH_CHECK(waits[i](&rig) == 0);
        rig_settle(&rig);
        LH_CHECK(lh_engine_over_wait(rig.engine, 0) == 1);
        LH_CHECK(rig.engine->updates.predicted_count == RIG_UNIT_COUNT - 1);
        LH_CHECK(rig_over_as_planned(&rig).step == 1);
        rig_finish(&rig);
    }
}

static void test_counts(void)
{
    static const struct {
        enum lh_engine_schedule schedule;
        unsigned gradients;
        uint64_t deferred_units;
    } cases[] = {{LH_ENGINE_SCHEDULE_DEFERRED, 0, 0},
                 {LH_ENGINE_SCHEDULE_DEFERRED, 0x21, 2}, /* units 0 (in part) and 3 */
                 {LH_ENGINE_SCHEDULE_DEFERRED, 0x03, 1}, /* both parameters of unit 0 */
                 {LH_ENGINE_SCHEDULE_SERIAL, 0xe2, 4},   /* units 0, 3, 4 and 5 */
                 /* all are updated as their gradients arrive */
                 {LH_ENGINE_SCHEDULE_OPTIMIZED, 0xef, 0},
                 {LH_ENGINE_SCHEDULE_NAIVE, 0xef, 0}};
    lh_test_name(
        "the units that waited for the close are counted, and serial queues them all then");
    for (size_t i = 0; i < LH_COUNT_OF(cases); i++) {
        struct rig rig;
        struct rig_opts opts = opts_deferred;
        opts.schedule = cases[i].schedule;
        rig_make(&rig, "defer-counts", opts);
        LH_CHECK(rig_step(&rig, cases[i].gradients) == 0);
        rig_settle(&rig); /* no thread waits */
        if (cases[i].schedule != LH_ENGINE_SCHEDULE_DEFERRED)
            LH_CHECK(lh_engine_over_wait(rig.engine, 0) == 1);
        struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
        LH_CHECK(stats.deferred_units == cases[i].deferred_units);
        LH_CHECK(stats.updated_params == (uint64_t)__builtin_popcount(cases[i].gradients));
        rig_finish(&rig);
    }
}

static void test_read_after_gradient(void)
{
    struct rig rig;
    struct lh_error err = {0};
    lh_test_name("a unit whose gradients are all there is read once more in backward: its update "
                 "waits; an eager one has begun, and the engine says so");
    rig_make_deferred(&rig, "defer-stale");
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_settle(&rig);
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        LH_CHECK(rig_acquire(&rig, i) == 0); /* the bytes of the open step's forward */
        lh_engine_unpin(rig.engine, i);
    }
    LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_finish(&rig);

    struct rig_opts opts = opts_deferred;
    opts.schedule = LH_ENGINE_SCHEDULE_OPTIMIZED;
    rig_make(&rig, "eager-stale", opts);
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_settle(&rig);
    LH_CHECK(rig_acquire(&rig, 3) == -ESTALE && lh_engine_error(rig.engine, &err) == -ESTALE);
    LH_CHECK(strstr(err.message, "unit 3 is read in backward"));
    rig_unmake(&rig);
}

static void test_pinned(void)
{
    struct rig rig;
    lh_test_name("a unit that is pinned at the close is updated after its last pin");
    rig_make_deferred(&rig, "defer-pinned");
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_acquire(&rig, 1) == 0);
    LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(lh_engine_over_wait(rig.engine, 0) == 0);
    rig_settle(&rig);
    LH_CHECK(lh_engine_over_wait(rig.engine, 0) == 0);
    LH_CHECK(rig.engine->updates.count == RIG_UNIT_COUNT - 2); /* all others are queued */
    /* Its parameters are stored after all of the first unit's arrays. */
    const uint8_t *before = rig.snapshots[0] + rig.units[0].bytes + 10 * rig.units[0].elements;
    LH_CHECK(memcmp(lh_engine_address(rig.engine, 1), before, rig.units[1].bytes) == 0);
    lh_engine_unpin(rig.engine, 1);
    rig_over_as_planned(&rig);
    rig_finish(&rig);
}

static void test_abort(void)
{
    struct rig rig;
    lh_test_name("an abort before the close has nothing to undo, even where steps are not "
                 "committed, and a closed step is not aborted by it");
    rig_make_deferred(&rig, "defer-abort");
    for (int i = 0; i < 4; i++) {
        LH_CHECK(rig_step(&rig, i % 2 ? 0x6e : RIG_GRADIENTS_ALL) == 0);
        if (i % 2) /* otherwise the closed step's updates have not run yet */
            rig_over(&rig);
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
        if (i >= 2)
            LH_CHECK(rig_backward(&rig, 0x60) == 0);
        LH_CHECK(rig_abort(&rig) == 0);
        rig_handles_drop(&rig);
        LH_CHECK(lh_engine_step(rig.engine) == rig.step);
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == 0);
    }
    rig_finish(&rig);
}

static void test_stop(void)
{
    lh_test_name("stopped at any point of its updates, the store is at the last committed step");
    for (uint32_t rounds = 0; rounds < 60; rounds += 3) {
        struct rig rig;
        struct rig_opts opts = opts_deferred;
        opts.commit_every = 1;
        opts.least_memory = true;
        rig_make(&rig, "defer-stop", opts);
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_over(&rig);
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(lh_engine_over_wait(rig.engine, 0) == 0);
        for (uint32_t i = 0; i < rounds; i++)
            rig_poll(&rig);
        bool is_over = lh_engine_over_wait(rig.engine, 0) == 1;
        LH_CHECK(rounds > 0 || !is_over);
        rig_shut(&rig);
        rig_reopen(&rig);
        LH_CHECK(is_over ? rig.step == 2 : rig.step >= 1);
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_finish(&rig);
    }
}

int main(void)
{
    test_not_before_close();
    test_order();
    test_jump();
    test_waits();
    test_counts();
    test_read_after_gradient();
    test_pinned();
    test_abort();
    test_stop();
    return 0;
}
