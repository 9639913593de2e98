/*
 * Test that a gradient that is not finite ends the engine with its parameter's name, whichever
 * schedule updates it, and that the store stays at the step before.
 */
#include <math.h>

#include "engine_fixture.h"
#include "lh_test.h"

#define GOOD_STEP_COUNT 2

static const enum lh_engine_schedule schedules[] = {
    LH_ENGINE_SCHEDULE_OPTIMIZED, LH_ENGINE_SCHEDULE_NAIVE, LH_ENGINE_SCHEDULE_DEFERRED,
    LH_ENGINE_SCHEDULE_SERIAL};

/* Where the gradient of the large unit is not finite: in its first chunk, or at its end. */
static const struct {
    bool at_end;
    float value;
} spoils[] = {{false, NAN}, {true, NAN}, {true, INFINITY}, {false, -INFINITY}};

/* A step in which only the last unit, which has one parameter, has a gradient. */
static int spoiled_step(struct rig *rig, bool at_end, float value)
{
    const uint32_t index = RIG_UNIT_COUNT - 1;
    const uint32_t param = rig->units[index].param_first;
    float *gradient = rig->gradients[param];
    uint64_t count = rig->params[param].count;
    LH_CHECK(rig_forward(rig, LH_ENGINE_MODE_TRAIN) == 0);
    LH_CHECK(lh_engine_acquire(rig->engine, index) == 1 ||
             lh_engine_acquire_wait(rig->engine, index, RIG_WAIT_S * 1000) == 1);
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        lh_engine_handle_drop(rig->engine, i);
    lh_engine_unpin(rig->engine, index);
    for (uint32_t i = 0; i < RIG_GROUP_COUNT; i++)
        lh_engine_hyper_set(rig->engine, i, &rig->hypers[i]);
    for (uint64_t i = 0; i < count; i++)
        gradient[i] = 1.0f;
    gradient[at_end ? count - 1 : 3] = value;
    LH_CHECK(lh_engine_gradient(rig->engine, param, gradient, LH_DTYPE_F32) == 0);
    int rc = lh_engine_close(rig->engine, "", 0, RIG_WAIT_S * 1000);
    LH_CHECK(rc == 1 || rc == -EDOM); /* updates may have begun before the close */
    return rig_flush(rig, true);
}

static void test_refused(void)
{
    lh_test_name("a gradient that is not finite ends the engine with its parameter and its step, "
                 "and the store stays at the step before");
    for (size_t i = 0; i < LH_COUNT_OF(schedules) * LH_COUNT_OF(spoils); i++) {
        struct rig rig;
        struct lh_error err = {0};
        char name[64];
        size_t spoil = i % LH_COUNT_OF(spoils);
        rig_make(&rig, "nan",
                 (struct rig_opts){.large = true,
                                   .in_memory = true,
                                   .commit_every = 1,
                                   .schedule = schedules[i / LH_COUNT_OF(spoils)]});
        for (int step = 0; step < GOOD_STEP_COUNT; step++)
            LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(rig_flush(&rig, true) == 0);
        LH_CHECK(spoiled_step(&rig, spoils[spoil].at_end, spoils[spoil].value) == -EDOM);
        LH_CHECK(lh_engine_error(rig.engine, &err) == -EDOM);
        snprintf(name, sizeof(name), "param %d has a gradient that is not finite",
                 RIG_PARAM_COUNT - 1);
        LH_CHECK(strstr(err.message, name) && strstr(err.message, "in step 3"));
        LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_TRAIN) == -EDOM);
        rig_shut(&rig);
        rig_reopen(&rig);
        rig_check_store(&rig, GOOD_STEP_COUNT);
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(rig_flush(&rig, true) == 0);
        rig_unmake(&rig);
    }
}

int main(void)
{
    test_refused();
    return 0;
}
