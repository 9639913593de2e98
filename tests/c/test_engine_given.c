/*
 * Test units whose states another process has: their new values take the place of an update, the
 * step waits for them, and they are no part of the norm.
 */
#include <math.h>

#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

/* fp32 with two parameters, fp16, and the large bf16 unit with several chunks. */
#define GIVEN (1u << 1 | 1u << 3 | 1u << 5)
#define GIVEN_GRADIENTS 0xacu

static const struct rig_opts opts_given = {.manual = true,
                                           .in_memory = true,
                                           .large = true,
                                           .schedule = LH_ENGINE_SCHEDULE_SERIAL,
                                           .commit_every = 1,
                                           .plain_gradients = true,
                                           .given = GIVEN};

static void test_values(struct rig_opts opts, const char *what)
{
    /* All; given units alone, some of their parameters, none of them; nothing; all again. */
    static const unsigned gradients[] = {RIG_GRADIENTS_ALL, GIVEN_GRADIENTS,  0x84, 0x43, 0,
                                         RIG_GRADIENTS_ALL, RIG_GRADIENTS_ALL};
    struct rig rig;
    lh_test_name("every step has the given values, committed like updates, by its plan: %s", what);
    rig_make(&rig, "given-values", opts);
    for (size_t i = 0; i < LH_COUNT_OF(gradients); i++) {
        LH_CHECK(rig_step(&rig, gradients[i]) == 0);
        struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
        if (opts.commit_every > 1)
            continue;
        bool has_update = opts.given == GIVEN && (gradients[i] & ~GIVEN_GRADIENTS);
        LH_CHECK(has_update == (stats.bytes[LH_ENGINE_LINK_STATE_WRITE] > 0));
        rig_check_store(&rig, rig.step);
    }
    rig_finish(&rig);
}

static void test_waits(void)
{
    struct rig_opts opts = opts_given;
    struct rig rig;
    lh_test_name("a closed step is over only when all given values are there, and is not stuck");
    opts.given_late = true;
    rig_make(&rig, "given-waits", opts);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        rig_settle(&rig);
        LH_CHECK(lh_engine_over_wait(rig.engine, 0) == 0);
        if (GIVEN & (1u << i))
            lh_given_arrived(rig.engine, i);
    }
    rig_over_as_planned(&rig);
    rig_finish(&rig);
}

static void test_readers_wait(void)
{
    struct rig_opts opts = opts_given;
    struct rig rig;
    lh_test_name("a reader of a given unit waits for its new values, other readers do not");
    opts.given_late = true;
    opts.manual = false;
    rig_make(&rig, "given-readers", opts);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
    LH_CHECK(rig_acquire(&rig, 4) == 0); /* compares the unit with the step's result */
    lh_engine_unpin(rig.engine, 4);
    LH_CHECK(lh_engine_acquire(rig.engine, 3) == 0);
    LH_CHECK(lh_engine_acquire_wait(rig.engine, 3, 500) == 0); /* longer than what is stuck */
    rig_give(&rig, RIG_GRADIENTS_ALL);
    LH_CHECK(lh_engine_acquire_wait(rig.engine, 3, RIG_WAIT_S * 1000) == 1);
    lh_engine_unpin(rig.engine, 3);
    rig_over(&rig);
    rig_finish(&rig);
}

static void test_never(void)
{
    struct rig_opts opts = opts_given;
    struct lh_error err = {0};
    struct rig rig;
    lh_test_name("values that will not come fail the engine, and the last commit stays");
    opts.given_late = true;
    rig_make(&rig, "given-never", opts);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_give(&rig, RIG_GRADIENTS_ALL);
    rig_over(&rig);
    lh_given_never(rig.engine); /* nothing is missing */
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    lh_given_arrived(rig.engine, 1);
    rig_settle(&rig);
    lh_given_never(rig.engine);
    rig_settle(&rig);
    LH_CHECK(lh_engine_over_wait(rig.engine, 0) == -ECONNABORTED);
    LH_CHECK(lh_engine_error(rig.engine, &err) == -ECONNABORTED);
    LH_CHECK(strstr(err.message, "step 2 cannot be finished") != NULL);
    rig_shut(&rig);
    rig_reopen(&rig);
    LH_CHECK(rig.step == 1);
    rig_unmake(&rig);
}

static void test_all_states(void)
{
    struct rig_opts opts = opts_given;
    struct rig rig;
    lh_test_name("a process that has all states is not affected if others send no values");
    opts.given = 0;
    rig_make(&rig, "given-all-states", opts);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    lh_given_never(rig.engine);
    rig_over_as_planned(&rig);
    rig_finish(&rig);
}

static void test_norm(void)
{
    struct rig_opts opts = opts_given;
    double whole = 0, own = 0, left = 0;
    struct rig rig;
    lh_test_name("given units are no part of the norm, whose parts can be read");
    rig_make(&rig, "given-norm", opts);
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(lh_norm_wait(rig.engine, &own, 0) == 0);
    rig_settle(&rig);
    LH_CHECK(lh_norm_wait(rig.engine, &own, 0) == 1);
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
        if (RIG_GRADIENTS_ALL & ~GIVEN_GRADIENTS & (1u << i))
            left += lh_norm_sums(rig.engine)[i];
    }
    LH_CHECK(own > 0 && fabs(left - own) <= 1e-13 * own);
    LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_over_as_planned(&rig);
    rig_finish(&rig);
    opts.given = 0;
    rig_make(&rig, "given-norm", opts);
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL & ~GIVEN_GRADIENTS) == 0);
    LH_CHECK(lh_norm_wait(rig.engine, &whole, 0) == 0);
    rig_settle(&rig);
    LH_CHECK(lh_norm_wait(rig.engine, &whole, 0) == 1);
    LH_CHECK(whole == own);
    rig_unmake(&rig);
}

static void test_refused(void)
{
    struct rig rig;
    lh_test_name("given units need updates that wait for step(), and gradients in main memory");
    rig_make(&rig, "given-refused", opts_given);
    struct lh_alloc alloc = LH_ALLOC_INIT;
    for (int i = 0; i < 2; i++) {
        struct lh_engine_opts opts = rig_engine_opts(&rig);
        struct lh_engine *engine = NULL;
        struct lh_error err = {0};
        opts.gradients_in_memory = i == 0;
        opts.schedule = i == 0 ? LH_ENGINE_SCHEDULE_DEFERRED : LH_ENGINE_SCHEDULE_SERIAL;
        LH_CHECK(lh_engine_create(&opts, &alloc, &engine, &err) == -EINVAL);
        LH_CHECK(strstr(err.message, "unit 1: states in another process require") != NULL);
    }
    LH_CHECK(alloc.live_count == 0);
    rig_unmake(&rig);
}

int main(void)
{
    struct rig_opts opts = opts_given;
    test_values(opts, "in full memory");
    opts.least_memory = true;
    test_values(opts, "in the least memory");
    opts.commit_every = 3;
    test_values(opts, "with a commit in every third step");
    opts.least_memory = false;
    test_values(opts, "with dirty units in memory");
    opts.given |= 1u << 0 | 1u << 4;
    opts.commit_every = 1;
    test_values(opts, "without any states");
    test_waits();
    test_readers_wait();
    test_never();
    test_all_states();
    test_norm();
    test_refused();
    return 0;
}
