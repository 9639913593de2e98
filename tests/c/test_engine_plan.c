/*
 * Test, for random models, budgets, schedules and orders of use, that every step moves over every
 * link exactly the bytes of its plan, and computes what training in memory computes.
 */
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_device.h"
#include "rig_repeat.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define STEP_COUNT 6

static bool chance(uint64_t *seed, uint64_t percent)
{
    return lh_test_random(seed) % 100 < percent;
}

/* There is always room for the first unit and two others, but seldom for all. */
static uint64_t device_bytes(const struct rig *rig, uint64_t *seed)
{
    uint64_t largest_bytes = 0;
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        largest_bytes = lh_max_u64(largest_bytes, rig->units[i].place_bytes);
    return lh_align_up(3 * largest_bytes + lh_test_random(seed) % (4 * largest_bytes),
                       LH_BLOCK_BYTES);
}

static struct rig_opts opts_random(uint64_t *seed, bool repeats)
{
    static const uint64_t commits[] = {1, 1, 2, 3, LH_ENGINE_COMMIT_NEVER};
    struct rig_opts opts = {
        .manual = true,
        .in_memory = true,
        .model_seed = lh_test_random(seed) | 1,
        .schedule = (enum lh_engine_schedule)(lh_test_random(seed) % LH_ENGINE_SCHEDULE_COUNT),
        .commit_every = commits[lh_test_random(seed) % LH_COUNT_OF(commits)],
        .directory_count = 1 + (uint32_t)(lh_test_random(seed) % 3),
        .least_memory = chance(seed, 80),
        .spare_bytes = chance(seed, 60) ? lh_test_random(seed) % 500000 : 0,
        .beside_bytes = chance(seed, 20) ? LH_BLOCK_BYTES * (1 + lh_test_random(seed) % 3) : 0,
        .plain_gradients = chance(seed, 70),
        .skip_verify = chance(seed, 20),
    };
    bool is_all_deferred =
        opts.schedule == LH_ENGINE_SCHEDULE_SERIAL || opts.schedule == LH_ENGINE_SCHEDULE_DEFERRED;
    opts.norms = is_all_deferred && chance(seed, 40);
    if (repeats) {
        opts.schedule = LH_ENGINE_SCHEDULE_OPTIMIZED;
        opts.commit_every = 1;
        opts.norms = true;
        opts.repeats = true;
    }
    if (chance(seed, 40)) {
        struct rig sized = {.opts = opts};
        for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) /* no unit of this model is larger */
            sized.units[i].place_bytes = 2 * 10240 * 4 + opts.beside_bytes;
        opts.device = "emu";
        opts.device_bytes = device_bytes(&sized, seed);
    }
    return opts;
}

/* A step mostly has all gradients, sometimes only those of some units or parameters, or none. */
static unsigned gradients_random(uint64_t *seed)
{
    if (chance(seed, 50))
        return RIG_GRADIENTS_ALL;
    return (unsigned)lh_test_random(seed) & RIG_GRADIENTS_ALL & (chance(seed, 20) ? 0x0c : ~0u);
}

/* Use a few units in a random order that no plan expects. */
static void wander(struct rig *rig, uint64_t *seed)
{
    LH_CHECK(lh_engine_begin(rig->engine, LH_ENGINE_MODE_EVAL) == 0);
    for (uint64_t i = lh_test_random(seed) % 9; i > 0; i--) {
        uint32_t unit = (uint32_t)(lh_test_random(seed) % RIG_UNIT_COUNT);
        LH_CHECK(rig_acquire(rig, unit) == 0);
        lh_engine_unpin(rig->engine, unit);
    }
}

/* A step, and maybe the next one's forward before this one is over: returns whether that is so. */
static bool step_run(struct rig *rig, uint64_t *seed, bool has_forward)
{
    unsigned gradients = gradients_random(seed);
    double square_sum = 0;
    bool is_repeated = rig->opts.repeats && chance(seed, 40);
    if (!has_forward)
        LH_CHECK(rig_forward(rig, LH_ENGINE_MODE_TRAIN) == 0);
    if (rig->opts.repeats)
        lh_repeat_wait_set(rig->engine, chance(seed, 30));
    LH_CHECK(rig_backward(rig, gradients) == 0);
    if (rig->opts.norms && chance(seed, 50)) {
        LH_CHECK(lh_norm_wait(rig->engine, &square_sum, 0) == 0);
        rig_settle(rig);
        LH_CHECK((rig->engine->norm->square_sum > 0) == (gradients != 0));
    }
    if (chance(seed, 50))
        rig_settle(rig);
    if (is_repeated)
        LH_CHECK(rig_close_again(rig, gradients, 0.37) == 0);
    else
        LH_CHECK(rig_close(rig, gradients) == 0);
    if (chance(seed, 30))
        LH_CHECK(rig_forward(rig, LH_ENGINE_MODE_EVAL) == 0);
    else if (chance(seed, 30))
        wander(rig, seed);
    bool is_begun = chance(seed, 40);
    if (is_begun)
        LH_CHECK(rig_forward(rig, LH_ENGINE_MODE_TRAIN) == 0);
    struct lh_engine_step_stats stats = rig_over_as_planned(rig);
    LH_CHECK(stats.updated_params == (uint64_t)__builtin_popcount(gradients));
    LH_CHECK(stats.begin_ns <= stats.close_ns && stats.close_ns <= stats.end_ns);
    if (!is_begun && chance(seed, 15))
        LH_CHECK(rig_flush(rig, chance(seed, 50)) == 0);
    return is_begun;
}

static void config_run(uint64_t first_seed, bool repeats)
{
    struct rig rig;
    uint64_t seed = first_seed;
    struct rig_opts opts = opts_random(&seed, repeats);
    rig_make(&rig, "plan", opts);
    bool has_forward = false;
    for (int i = 0; i < STEP_COUNT; i++) {
        if (!has_forward && chance(&seed, 10) && opts.commit_every == 1) {
            LH_CHECK(rig_forward_backward(&rig, gradients_random(&seed)) == 0);
            LH_CHECK(rig_abort(&rig) == 0);
        }
        has_forward = step_run(&rig, &seed, has_forward);
    }
    if (has_forward) { /* the forward of a step that has no backward */
        LH_CHECK(rig_abort(&rig) == 0);
        rig_handles_drop(&rig);
    }
    if (rig.device)
        rig_device_check(&rig);
    rig_finish(&rig);
}

static void test_random(uint64_t round_count)
{
    for (uint64_t i = 0; i < round_count; i++) {
        lh_test_name("every link's bytes are the plan's, and the bits those of memory, seed %d",
                     (int)i);
        config_run(i, false);
        lh_test_name("the same if steps may be repeated with another factor, seed %d", (int)i);
        config_run(i, true);
    }
}

int main(void)
{
    test_random(lh_test_is_fast() || LH_TEST_IS_SLOW ? 8 : 25);
    return 0;
}
