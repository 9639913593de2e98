/*
 * Test steps whose updates run before their norm is known: that one which is repeated with another
 * factor ends as if it had waited, that gradients stay for it and no longer, and that nothing of a
 * step is committed before its close.
 */
#include <math.h>

#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_repeat.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define GRADIENT_WRITE LH_ENGINE_LINK_GRADIENT_WRITE
#define GRADIENT_READ LH_ENGINE_LINK_GRADIENT_READ
#define PARAM_WRITE LH_ENGINE_LINK_PARAM_WRITE

static const struct rig_opts opts_repeat = {.manual = true,
                                            .in_memory = true,
                                            .commit_every = 1,
                                            .plain_gradients = true,
                                            .norms = true,
                                            .repeats = true};

/* The units that are updated though the step is open. */
static uint32_t updated_count(const struct rig *rig)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        const struct lh_unit *unit = &rig->engine->units[i];
        count += unit->chunk_count > 0 && unit->update.chunks_computed == unit->chunk_count;
    }
    return count;
}

static uint32_t held_count(const struct rig *rig)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++)
        count += !lh_engine_gradient_is_consumed(rig->engine, i);
    return count;
}

/* --- Bits and bytes --------------------------------------------------------------------------- */

static void test_bits(struct rig_opts opts, const char *what)
{
    static const double factors[] = {1, 0.3, 1, 0.7, 0.1, 1};
    static const unsigned gradients[] = {RIG_GRADIENTS_ALL, RIG_GRADIENTS_ALL, 0xad, 0x6e,
                                         RIG_GRADIENTS_ALL, RIG_GRADIENTS_ALL};
    struct rig rig;
    lh_test_name("steps that are repeated with a factor, and those that are not, end as in memory, "
                 "and move the bytes that they planned: %s",
                 what);
    rig_make(&rig, "repeat-bits", opts);
    for (size_t i = 0; i < LH_COUNT_OF(factors); i++) {
        double square_sum = 0;
        LH_CHECK(rig_forward_backward(&rig, gradients[i]) == 0);
        LH_CHECK(rig_norm(&rig, &square_sum) == 0 && square_sum > 0);
        if (opts.manual)
            rig_settle(&rig);
        LH_CHECK(!opts.manual || updated_count(&rig) > 0);
        if (factors[i] < 1)
            LH_CHECK(rig_close_again(&rig, gradients[i], factors[i]) == 0);
        else
            LH_CHECK(rig_close(&rig, gradients[i]) == 0);
        struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
        LH_CHECK(stats.updated_params == (uint64_t)__builtin_popcount(gradients[i]));
        LH_CHECK(held_count(&rig) == 0);
    }
    rig_finish(&rig);
}

static void test_written_twice(void)
{
    struct rig rig;
    uint64_t once = 0;
    lh_test_name("a repetition writes what it undoes once more; the step after it, only its own");
    rig_make(&rig, "repeat-bytes", opts_repeat);
    for (int i = 0; i < 3; i++) {
        double square_sum = 0;
        LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(rig_norm(&rig, &square_sum) == 0);
        rig_settle(&rig);
        if (i == 1)
            LH_CHECK(rig_close_again(&rig, RIG_GRADIENTS_ALL, 0.5) == 0);
        else
            LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
        struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
        once = i == 0 ? stats.bytes[PARAM_WRITE] : once;
        LH_CHECK(once > 0 && stats.bytes[PARAM_WRITE] == (i == 1 ? 2 : 1) * once);
        LH_CHECK(i < 2 || stats.replans == 0); /* the repetition is not expected again */
    }
    rig_finish(&rig);
}

static void test_waits(bool least_memory)
{
    struct rig rig;
    struct rig_opts opts = opts_repeat;
    lh_test_name("a step may wait for its close instead: no update begins before, with %s memory",
                 least_memory ? "the least" : "all");
    opts.least_memory = least_memory;
    rig_make(&rig, "repeat-waits", opts);
    for (int i = 0; i < 4; i++) {
        bool waits = i % 2;
        double square_sum = 0;
        lh_repeat_wait_set(rig.engine, waits);
        LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(rig_norm(&rig, &square_sum) == 0);
        rig_settle(&rig);
        LH_CHECK((updated_count(&rig) == 0) == waits);
        if (waits)
            lh_engine_gradient_scale_set(rig.engine, 0.25);
        rig.factor = waits ? 0.25 : 1;
        LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
        struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
        LH_CHECK((stats.bytes[GRADIENT_READ] > 0) == (waits && least_memory));
    }
    rig_finish(&rig);
}

/* --- Gradients -------------------------------------------------------------------------------- */

static void test_gradients_stay(void)
{
    lh_test_name("gradients stay with their caller until the close where memory has room for them, "
                 "and on SSD otherwise");
    for (int least = 0; least < 2; least++) {
        struct rig rig;
        struct rig_opts opts = opts_repeat;
        opts.least_memory = least;
        rig_make(&rig, "repeat-stay", opts);
        double square_sum = 0;
        LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(rig_norm(&rig, &square_sum) == 0);
        rig_settle(&rig);
        LH_CHECK(updated_count(&rig) == RIG_UNIT_COUNT - 1);
        LH_CHECK(held_count(&rig) == (least ? 0 : RIG_PARAM_COUNT - 1));
        /* no update in progress holds them: nothing waits for room */
        LH_CHECK(atomic_load(&rig.engine->update_gradient_bytes) == 0);
        LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_settle(&rig);
        LH_CHECK(held_count(&rig) == 0);
        struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
        LH_CHECK((stats.bytes[GRADIENT_WRITE] > 0) == least && stats.bytes[GRADIENT_READ] == 0);
        rig_finish(&rig);
    }
}

static void test_no_more_is_written(void)
{
    struct rig rig;
    struct rig_opts opts = opts_repeat;
    lh_test_name("gradients that are not on SSD at the close of a step stay away from it");
    opts.least_memory = true;
    rig_make(&rig, "repeat-stop", opts);
    LH_CHECK(rig_forward_backward(&rig, 0x80) == 0);
    rig.holds.jobs = true;
    rig_settle(&rig);
    LH_CHECK(rig_close(&rig, 0x80) == 0);
    rig_settle(&rig);
    rig.holds.jobs = false;
    struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
    LH_CHECK(stats.bytes[GRADIENT_WRITE] <= rig.units[5].bytes);
    rig_finish(&rig);
}

/* --- When it is interrupted ------------------------------------------------------------------- */

static void test_every_moment(struct rig_opts opts, const char *what)
{
    struct rig rig;
    lh_test_name("a repetition may be asked for while updates are at any point, twice, and the step"
                 " may be discarded before and after it: %s",
                 what);
    rig_make(&rig, "repeat-moments", opts);
    for (uint32_t rounds = 0; rounds < 60; rounds += 3) {
        double square_sum = 0;
        LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        if (rounds % 2)
            LH_CHECK(rig_norm(&rig, &square_sum) == 0);
        for (uint32_t i = 0; i < rounds; i++)
            rig_poll(&rig);
        if (rounds % 4 == 3) {
            LH_CHECK(lh_repeat(rig.engine, 0) == 0);
            for (uint32_t i = 0; i < rounds / 4; i++)
                rig_poll(&rig);
        }
        if (rounds % 5 == 4) {
            LH_CHECK(rig_abort(&rig) == 0);
            LH_CHECK(held_count(&rig) == 0);
            continue;
        }
        LH_CHECK(rig_norm(&rig, &square_sum) == 0 && square_sum > 0);
        LH_CHECK(rig_close_again(&rig, RIG_GRADIENTS_ALL, 0.125) == 0);
        rig_over_as_planned(&rig);
    }
    rig_finish(&rig);
}

static void test_nothing_is_committed(void)
{
    lh_test_name("a store whose engine ends before, during and after a repetition has the step "
                 "before, until the close's commit");
    for (uint32_t rounds = 0; rounds < 40; rounds += 4) {
        struct rig rig;
        double square_sum = 0;
        rig_make(&rig, "repeat-crash", opts_repeat);
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_over(&rig);
        LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(rig_norm(&rig, &square_sum) == 0);
        LH_CHECK(lh_repeat(rig.engine, 0) == 0);
        for (uint32_t i = 0; i < rounds; i++)
            rig_poll(&rig);
        rig_shut(&rig);
        rig_reopen(&rig);
        LH_CHECK(rig.step == 1);
        LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(rig_norm(&rig, &square_sum) == 0);
        LH_CHECK(rig_close_again(&rig, RIG_GRADIENTS_ALL, 0.5) == 0);
        rig_finish(&rig);
    }
}

static void test_not_finite(void)
{
    struct lh_error err = {0};
    lh_test_name(
        "an update that makes a NaN is refused at the close, unless the step is discarded");
    for (int closes = 0; closes < 2; closes++) {
        struct rig rig;
        double square_sum = 0;
        rig_make(&rig, "repeat-nan", opts_repeat);
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
        rig_handles_drop(&rig);
        rig_hypers_set(&rig);
        for (uint32_t i = 2; i < 4; i++) {
            ((float *)rig.gradients[i])[17] = NAN;
            LH_CHECK(lh_engine_gradient(rig.engine, i, rig.gradients[i], LH_DTYPE_F32) == 0);
        }
        LH_CHECK(rig_norm(&rig, &square_sum) == 0 && square_sum != square_sum);
        rig_settle(&rig);
        LH_CHECK(updated_count(&rig) == 1 && lh_engine_error(rig.engine, &err) == 0);
        if (closes) {
            LH_CHECK(lh_engine_close(rig.engine, "", 0, 0) == 1);
            rig_settle(&rig);
            LH_CHECK(lh_engine_error(rig.engine, &err) == -EDOM);
            LH_CHECK(strstr(err.message, "not finite") && strstr(err.message, "step 1"));
            rig_shut(&rig);
            rig_reopen(&rig);
            LH_CHECK(rig.step == 0);
        } else {
            LH_CHECK(rig_abort(&rig) == 0);
        }
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_finish(&rig);
    }
}

static void test_pinned(void)
{
    struct rig rig;
    struct lh_error err = {0};
    double square_sum = 0;
    lh_test_name("a repetition fails by name if tensors are views of a unit that was updated");
    rig_make(&rig, "repeat-pinned", opts_repeat);
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_norm(&rig, &square_sum) == 0);
    rig_settle(&rig);
    atomic_fetch_add(&rig.engine->units[3].shared.word, 1);
    LH_CHECK(lh_repeat(rig.engine, 0) == 0);
    rig_settle(&rig);
    LH_CHECK(lh_repeat(rig.engine, 0) == -ENOTRECOVERABLE);
    LH_CHECK(lh_engine_error(rig.engine, &err) == -ENOTRECOVERABLE);
    LH_CHECK(strstr(err.message, "has to be repeated") && strstr(err.message, "unit 3"));
    rig_unmake(&rig);
}

/* --- What cannot be repeated ------------------------------------------------------------------ */

static void test_refused(void)
{
    struct rig rig;
    struct lh_engine *engine = NULL;
    struct lh_error err = {0};
    lh_test_name("repetitions are refused without norms, a commit in each step, the eager schedule,"
                 " or room for gradients; and the steps between commits cannot be set");
    struct rig_opts small = opts_repeat;
    small.least_memory = true;
    rig_make(&rig, "repeat-refused", small);
    for (int i = 0; i < 5; i++) {
        struct lh_engine_opts opts = rig_engine_opts(&rig);
        struct lh_alloc alloc = LH_ALLOC_INIT;
        opts.norms = i != 0;
        opts.commit_every = i == 1 ? 2 : 1;
        opts.schedule = i == 2 ? LH_ENGINE_SCHEDULE_NAIVE : LH_ENGINE_SCHEDULE_OPTIMIZED;
        if (i == 3)
            opts.apart.store = NULL;
        int rc = lh_engine_create(&opts, &alloc, &engine, &err);
        LH_CHECK(rc == (i < 3 ? -EINVAL : i == 3 ? -ENOSPC : 0));
        lh_engine_destroy(engine);
        LH_CHECK(alloc.live_count == 0);
    }
    LH_CHECK(!lh_every_set(rig.engine, 3));
    rig_unmake(&rig);
}

int main(void)
{
    struct rig_opts opts = opts_repeat;
    test_bits(opts, "in memory");
    opts.least_memory = true;
    test_bits(opts, "gradients on SSD");
    opts.large = true;
    test_bits(opts, "several chunks");
    test_every_moment(opts, "gradients on SSD");
    opts.least_memory = false;
    test_every_moment(opts, "in memory");
    opts.device = "emu";
    opts.device_bytes = 6 << 20;
    test_bits(opts, "an accelerator");
    opts.least_memory = true;
    test_bits(opts, "an accelerator, gradients on SSD");
    test_every_moment(opts, "an accelerator, gradients on SSD");
    opts = opts_repeat;
    opts.manual = false;
    opts.least_memory = true;
    test_bits(opts, "with threads");
    test_written_twice();
    test_waits(false);
    test_waits(true);
    test_gradients_stay();
    test_no_more_is_written();
    test_nothing_is_committed();
    test_not_finite();
    test_pinned();
    test_refused();
    return 0;
}
