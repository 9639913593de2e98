/*
 * Test units that owe the steps in which they have no gradient ([Note: Idle units] in idle.h): each
 * use sees the bytes of training in which such a step has a gradient of zeros, and a unit that is
 * not used is neither read nor written.
 */
#include <string.h>

#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

/* Units 3 (fp16), 4 (fp32) and 5 (bf16), each with one parameter, are parts of one tensor. */
#define FAMILY (1u << 3 | 1u << 4 | 1u << 5)
#define GRADIENTS_OF_3 (RIG_GRADIENTS_ALL & ~0xc0u)
#define GRADIENTS_OF_NONE (RIG_GRADIENTS_ALL & ~0xe0u)
/* More than one pass makes (STEPS_PER_PASS in idle.c). */
#define STEPS_MANY 40

static struct rig_opts opts_of(enum lh_engine_schedule schedule)
{
    return (struct rig_opts){.manual = true,
                             .in_memory = true,
                             .least_memory = true,
                             .schedule = schedule,
                             .announced = FAMILY,
                             .family = FAMILY,
                             .commit_every = 1};
}

/* A step of which only the units outside of `unused` are part, with hyper-parameters of its own. */
static void step_without(struct rig *rig, unsigned unused, unsigned gradients)
{
    for (uint32_t i = 0; i < RIG_GROUP_COUNT; i++)
        rig->hypers[i].lr *= 0.9;
    rig->unused = unused;
    LH_CHECK(rig_step(rig, gradients) == 0);
    rig->unused = 0;
}

static void settle_all(struct rig *rig)
{
    rig_wait_begin(rig);
    int rc = 0;
    do {
        rc = lh_settle_all(rig->engine, rig_slice_ms(rig));
    } while (rig_waits(rig, rc));
    LH_CHECK(rc == 1);
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        LH_CHECK(lh_idle_owed(rig->engine, i) == 0);
}

static void finish(struct rig *rig)
{
    settle_all(rig);
    rig_finish(rig);
}

static void test_schedules(void)
{
    static const enum lh_engine_schedule schedules[] = {
        LH_ENGINE_SCHEDULE_OPTIMIZED, LH_ENGINE_SCHEDULE_SERIAL, LH_ENGINE_SCHEDULE_DEFERRED};
    static const char *const devices[] = {NULL, "emu"};
    lh_test_name("an idle unit is moved by each step that it owes, with the step's own "
                 "hyper-parameters, before its next use");
    for (uint32_t i = 0; i < 2 * LH_COUNT_OF(schedules); i++) {
        struct rig rig;
        struct rig_opts opts = opts_of(schedules[i / 2]);
        opts.device = devices[i % 2];
        opts.device_bytes = 8192 + 2 * 16384; /* few units fit */
        opts.manual = !opts.device;
        opts.plain_gradients = true;
        rig_make(&rig, "idle-schedules", opts);
        step_without(&rig, 0, RIG_GRADIENTS_ALL);
        step_without(&rig, 1u << 4 | 1u << 5, GRADIENTS_OF_3);
        step_without(&rig, 1u << 4, RIG_GRADIENTS_ALL & ~0x40u);
        step_without(&rig, 1u << 4 | 1u << 5, GRADIENTS_OF_3);
        step_without(&rig, 0, RIG_GRADIENTS_ALL);
        step_without(&rig, 1u << 3 | 1u << 5, RIG_GRADIENTS_ALL & ~0xa0u);
        finish(&rig);
    }
}

static void test_many(void)
{
    struct rig rig;
    struct rig_opts opts = opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED);
    lh_test_name("a unit of several chunks owes more steps than one pass makes");
    opts.large = true;
    rig_make(&rig, "idle-many", opts);
    step_without(&rig, 0, RIG_GRADIENTS_ALL);
    for (int i = 0; i < STEPS_MANY; i++)
        step_without(&rig, 1u << 4 | 1u << 5, GRADIENTS_OF_3);
    rig_over(&rig);
    LH_CHECK(lh_idle_owed(rig.engine, 5) == STEPS_MANY);
    step_without(&rig, 0, RIG_GRADIENTS_ALL);
    finish(&rig);
}

/* The bytes of states that the steps of which unit 5 is no part read and write. */
static uint64_t state_bytes(const struct rig *rig, uint32_t unit)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++)
        bytes +=
            lh_unit_state_bytes(&rig->engine->units[unit].states[i], rig->units[unit].elements);
    return bytes;
}

static void test_bytes(void)
{
    struct rig rig;
    lh_test_name("a step neither reads nor writes what idle units owe, and one that uses an idle "
                 "unit settles it once, as planned");
    rig_make(&rig, "idle-bytes", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED));
    for (int i = 0; i < 3; i++)
        step_without(&rig, 0, RIG_GRADIENTS_ALL);
    struct lh_engine_step_stats all = rig_over_as_planned(&rig);
    step_without(&rig, 1u << 4 | 1u << 5, GRADIENTS_OF_3);
    struct lh_engine_step_stats some = rig_over_as_planned(&rig);
    uint64_t idle_bytes = state_bytes(&rig, 4) + state_bytes(&rig, 5);
    const enum lh_engine_link links[] = {LH_ENGINE_LINK_STATE_READ, LH_ENGINE_LINK_STATE_WRITE};
    for (size_t i = 0; i < LH_COUNT_OF(links); i++)
        LH_CHECK(some.bytes[links[i]] + idle_bytes == all.bytes[links[i]]);
    step_without(&rig, 1u << 5, RIG_GRADIENTS_ALL & ~0x80u);
    struct lh_engine_step_stats after = rig_over_as_planned(&rig);
    LH_CHECK(after.bytes[LH_ENGINE_LINK_STATE_READ] ==
             some.bytes[LH_ENGINE_LINK_STATE_READ] + 2 * state_bytes(&rig, 4));
    LH_CHECK(lh_idle_owed(rig.engine, 5) == 2 && lh_idle_owed(rig.engine, 4) == 0);
    finish(&rig);
}

static void test_family_without_gradients(void)
{
    struct rig rig;
    lh_test_name("a step in which no unit of a family has a gradient is owed by none, and what was "
                 "owed before it is made first");
    rig_make(&rig, "idle-family", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED));
    step_without(&rig, 0, RIG_GRADIENTS_ALL);
    step_without(&rig, 1u << 4 | 1u << 5, GRADIENTS_OF_3);
    step_without(&rig, FAMILY, GRADIENTS_OF_NONE);
    rig_over(&rig);
    for (uint32_t i = 3; i < RIG_UNIT_COUNT; i++)
        LH_CHECK(lh_idle_owed(rig.engine, i) == 0);
    step_without(&rig, 0, RIG_GRADIENTS_ALL);
    finish(&rig);
}

static void test_reopened(void)
{
    lh_test_name("after a flush the last step is reopened for units that owe, in forward, in an "
                 "evaluation, and if all are settled");
    for (uint64_t commit_every = 1; commit_every <= 3; commit_every += 2) {
        struct rig rig;
        struct rig_opts opts = opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED);
        opts.commit_every = commit_every;
        rig_make(&rig, "idle-reopened", opts);
        for (int round = 0; round < 3; round++) {
            step_without(&rig, 0, RIG_GRADIENTS_ALL);
            step_without(&rig, 1u << 4 | 1u << 5, GRADIENTS_OF_3);
            LH_CHECK(rig_flush(&rig, round > 0) == 0);
            LH_CHECK(lh_idle_owed(rig.engine, 4) == 1);
            rig.unused = 1u << 5;
            if (round == 1)
                LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == 0);
            if (round == 2)
                settle_all(&rig);
            LH_CHECK(rig_flush(&rig, true) == 0);
            LH_CHECK(lh_idle_owed(rig.engine, 4) == (round == 0));
            step_without(&rig, 1u << 3, RIG_GRADIENTS_ALL & ~0x20u);
            rig_over_as_planned(&rig);
        }
        finish(&rig);
    }
}

static void test_resume(void)
{
    lh_test_name("a commit has what units owe, and they make it after a crash");
    for (int flushes = 0; flushes < 2; flushes++) {
        struct rig rig;
        rig_make(&rig, "idle-resume", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED));
        step_without(&rig, 0, RIG_GRADIENTS_ALL);
        for (int i = 0; i < 3; i++)
            step_without(&rig, 1u << 4 | 1u << 5, GRADIENTS_OF_3);
        rig.unused = 1u << 5;
        LH_CHECK(rig_flush(&rig, true) == 0);
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == 0); /* settles unit 4 in memory */
        if (flushes)
            LH_CHECK(rig_flush(&rig, true) == 0);
        rig_stop(&rig);
        rig_shut(&rig);
        rig.unchecked = flushes ? 1u << 5 : 1u << 4 | 1u << 5;
        rig_reopen(&rig);
        rig.unchecked = 0;
        LH_CHECK(lh_idle_owed(rig.engine, 5) == 3);
        LH_CHECK(lh_idle_owed(rig.engine, 4) == (flushes ? 0 : 3));
        step_without(&rig, 0, RIG_GRADIENTS_ALL);
        finish(&rig);
    }
}

static void test_abort(void)
{
    struct rig rig;
    lh_test_name("a step that is discarded leaves what its forward has settled");
    rig_make(&rig, "idle-abort", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED));
    step_without(&rig, 0, RIG_GRADIENTS_ALL);
    step_without(&rig, 1u << 4 | 1u << 5, GRADIENTS_OF_3);
    rig.unused = 1u << 5;
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL & ~0x80u) == 0);
    LH_CHECK(rig_abort(&rig) == 0);
    rig_handles_drop(&rig);
    LH_CHECK(lh_idle_owed(rig.engine, 4) == 0 && lh_idle_owed(rig.engine, 5) == 1);
    step_without(&rig, 0, RIG_GRADIENTS_ALL); /* unit 5 owes, and the last step is over */
    finish(&rig);
}

/* Check that the engine has failed, and end the rig. */
static void fail_end(struct rig *rig, int code)
{
    struct lh_error err = {0};
    rig_settle(rig);
    LH_CHECK(lh_engine_error(rig->engine, &err) == code);
    rig_stop(rig);
    rig_shut(rig);
    rig_unmake(rig);
}

static void test_failures(void)
{
    struct rig rig;
    lh_test_name("a gradient of an older forward of a unit that owes ends the engine");
    rig_make(&rig, "idle-gradient", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED));
    step_without(&rig, 0, RIG_GRADIENTS_ALL);
    step_without(&rig, 1u << 5, RIG_GRADIENTS_ALL & ~0x80u);
    rig_over(&rig);
    rig_hypers_set(&rig);
    LH_CHECK(lh_engine_gradient(rig.engine, 7, rig.gradients[7], rig_gradient_dtype(&rig, 7)) == 0);
    fail_end(&rig, -ESTALE);

    lh_test_name("a unit that owes is not read between backward and close");
    rig_make(&rig, "idle-between", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED));
    step_without(&rig, 0, RIG_GRADIENTS_ALL);
    step_without(&rig, 1u << 5, RIG_GRADIENTS_ALL & ~0x80u);
    rig.unused = 1u << 5;
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL & ~0x80u) == 0);
    LH_CHECK(rig_acquire(&rig, 5) == -EBUSY);
    fail_end(&rig, -EBUSY);

    lh_test_name("a unit of a family has gradients for all of its parameters, or for none");
    struct rig_opts opts = opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED);
    opts.family = 1u << 1 | 1u << 4;
    opts.announced = opts.family;
    rig_make(&rig, "idle-partial", opts);
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL & ~0x04u) == 0);
    (void)rig_close(&rig, RIG_GRADIENTS_ALL & ~0x04u);
    fail_end(&rig, -EOPNOTSUPP);
}

int main(void)
{
    test_schedules();
    test_many();
    test_bytes();
    test_family_without_gradients();
    test_reopened();
    test_resume();
    test_abort();
    test_failures();
    return 0;
}
