/* Units for which pinned units leave no room: when they are refused, and when not. Waits. */
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

/* The engine refuses a unit after a shorter time than this. */
#define LONG_MS 1500

/* Pin units until one is refused; return its index. The units before it are pinned. */
static uint32_t pin_until_refused(struct rig *rig)
{
    struct lh_error err = {0};
    LH_CHECK(lh_engine_begin(rig->engine, LH_ENGINE_MODE_EVAL) == 0);
    for (uint32_t unit = 0; unit < RIG_UNIT_COUNT; unit++) {
        int rc = lh_engine_acquire(rig->engine, unit);
        if (rc == 0)
            rc = lh_engine_acquire_wait(rig->engine, unit, 1000 * RIG_WAIT_S);
        if (rc == 1)
            continue;
        LH_CHECK(rc == -ENOSPC && lh_engine_error(rig->engine, NULL) == 0);
        lh_engine_refusal(rig->engine, &err);
        LH_CHECK(strstr(err.message, "raise host_bytes, of which") != NULL);
        return unit;
    }
    LH_CHECK(false && "the smallest budget has room for every unit");
    return 0;
}

static void unpin_all(struct rig *rig, uint32_t count)
{
    for (uint32_t unit = 0; unit < count; unit++)
        lh_engine_unpin(rig->engine, unit);
}

static void rig_least(struct rig *rig, const char *name)
{
    rig_make(rig, name,
             (struct rig_opts){.least_memory = true, .commit_every = 1, .in_memory = true});
}

static void finish(struct rig *rig)
{
    LH_CHECK(rig_step(rig, RIG_GRADIENTS_ALL) == 0);
    rig_shut(rig);
    rig_reopen(rig);
    rig_unmake(rig);
}

static void test_refused(void)
{
    struct rig rig;
    lh_test_name("a unit without room is refused, and the engine works on");
    rig_least(&rig, "refused");
    uint32_t count = pin_until_refused(&rig);
    unpin_all(&rig, count);
    finish(&rig);
}

static void test_tentative(void)
{
    struct rig rig;
    lh_test_name("a tentative wait is not refused, and gets the room that its caller makes");
    rig_least(&rig, "tentative");
    uint32_t count = pin_until_refused(&rig);
    lh_engine_tentative_begin(rig.engine);
    LH_CHECK(lh_engine_acquire(rig.engine, count) == 0);
    LH_CHECK(lh_engine_acquire_wait(rig.engine, count, LONG_MS) == 0);
    unpin_all(&rig, count);
    lh_engine_tentative_end(rig.engine);
    LH_CHECK(lh_engine_acquire_wait(rig.engine, count, 1000 * RIG_WAIT_S) == 1);
    lh_engine_unpin(rig.engine, count);
    finish(&rig);
}

static void test_final(void)
{
    struct rig rig;
    lh_test_name("a tentative wait that ends without making room is refused");
    rig_least(&rig, "final");
    uint32_t count = pin_until_refused(&rig);
    lh_engine_tentative_begin(rig.engine);
    LH_CHECK(lh_engine_acquire(rig.engine, count) == 0);
    LH_CHECK(lh_engine_acquire_wait(rig.engine, count, LONG_MS) == 0);
    lh_engine_tentative_end(rig.engine);
    LH_CHECK(lh_engine_acquire_wait(rig.engine, count, 1000 * RIG_WAIT_S) == -ENOSPC);
    unpin_all(&rig, count);
    finish(&rig);
}

static void test_counted(void)
{
    struct rig rig;
    lh_test_name("a wait counts for the step that waits, though the previous one is not over");
    rig_make(&rig, "counted",
             (struct rig_opts){.manual = true, .commit_every = 1, .in_memory = true});
    for (uint64_t step = 1; step <= 3; step++) {
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
        rig_handles_drop(&rig);
        rig.holds.requests = LH_IO_FAULT_ON(LH_IO_KIND_WRITE);
        LH_CHECK(rig_close(&rig, 0) == 0);
        rig_settle(&rig);
        struct lh_engine_step_stats stats = {0};
        LH_CHECK(!lh_engine_stats(rig.engine, &stats) || stats.step < step);
        lh_engine_post(rig.engine, LH_MESSAGE_WAITED, 0, 0, step << 50);
        lh_engine_post(rig.engine, LH_MESSAGE_WAITED, LH_CHUNK_NONE, 0, step << 55);
        rig_settle(&rig);
        rig.holds.requests = 0;
        stats = rig_over(&rig);
        /* The test's own waits are shorter than 2^50 ns. */
        LH_CHECK(stats.step == step && stats.param_wait_ns >> 50 == step - 1);
        LH_CHECK(stats.gradient_wait_ns >> 55 == step - 1);
    }
    rig_finish(&rig);
}

int main(void)
{
    test_refused();
    test_tentative();
    test_final();
    test_counted();
    return 0;
}
