/*
 * Test the norm of a step's gradients: its value, which gradients it sums and when, that updates
 * wait for it, and the factor that it leads to.
 */
#include <math.h>

#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

static const struct rig_opts opts_norm = {
    .manual = true, .in_memory = true, .schedule = LH_ENGINE_SCHEDULE_DEFERRED, .commit_every = 1};

/* Convert fp16 by its definition. */
static double half_value(uint16_t bits)
{
    int exponent = (bits >> 10) & 31;
    double fraction = (double)(bits & 1023) / 1024;
    double size = exponent == 31  ? fraction > 0 ? (double)NAN : (double)INFINITY
                  : exponent == 0 ? ldexp(fraction, -14)
                                  : ldexp(1 + fraction, exponent - 15);
    return bits >> 15 ? -size : size;
}

static double gradient_value(const struct rig *rig, uint32_t param, uint64_t index)
{
    const uint8_t *gradient = rig->gradients[param];
    enum lh_dtype dtype = rig_gradient_dtype(rig, param);
    uint16_t narrow = 0;
    uint32_t bits = 0;
    float value = 0;
    memcpy(&narrow, gradient + index * lh_dtype_bytes(dtype), sizeof(narrow));
    if (dtype == LH_DTYPE_F16)
        return half_value(narrow);
    bits = (uint32_t)narrow << 16;
    if (dtype == LH_DTYPE_F32)
        memcpy(&bits, gradient + 4 * index, sizeof(bits));
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* Add squares in extended precision, one element after the other. */
static double reference(const struct rig *rig, unsigned gradients)
{
    long double sum = 0;
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
        for (uint64_t j = 0; (gradients & (1u << i)) && j < rig->params[i].count; j++)
            sum += (long double)gradient_value(rig, i, j) * gradient_value(rig, i, j);
    }
    return (double)sum;
}

/* Ask for the norm, let the engine run until it has replied, and return the reply. */
static double norm(struct rig *rig)
{
    double found = -1;
    LH_CHECK(lh_norm_wait(rig->engine, &found, 0) == 0);
    rig_settle(rig);
    LH_CHECK(lh_norm_wait(rig->engine, &found, 0) == 1);
    return found;
}

/* --- The value -------------------------------------------------------------------------------- */

static void test_value(struct rig_opts opts, const char *what)
{
    static const unsigned gradients[] = {RIG_GRADIENTS_ALL, 0xad, 0, 0x80, 0x6e};
    struct rig rig;
    lh_test_name("the norm is that of all gradients that came, of complete and incomplete units, "
                 "and 0 without any: %s",
                 what);
    rig_make(&rig, "norm-value", opts);
    for (size_t i = 0; i < LH_COUNT_OF(gradients); i++) {
        LH_CHECK(rig_forward_backward(&rig, gradients[i]) == 0);
        double expected = reference(&rig, gradients[i]);
        double found = norm(&rig);
        /* The engine adds in another order, in fp64. */
        LH_CHECK(fabs(found - expected) <= 1e-13 * expected);
        LH_CHECK((gradients[i] == 0) == (found == 0));
        LH_CHECK(rig_close(&rig, gradients[i]) == 0);
        rig_over_as_planned(&rig);
    }
    rig_finish(&rig);
}

static void test_same_bits(void)
{
    double expected = 0;
    lh_test_name("neither budget, schedule, SSD nor the moment of the question change a bit of it");
    for (unsigned i = 0; i < 16; i += i ? 3 : 1) {
        struct rig rig;
        struct rig_opts opts = opts_norm;
        opts.large = true;
        opts.least_memory = i & 1;
        opts.norms = i & 2;
        opts.schedule = i & 4 ? LH_ENGINE_SCHEDULE_SERIAL : LH_ENGINE_SCHEDULE_DEFERRED;
        opts.plain_gradients = true;
        if (i & 8) {
            opts.device = "emu";
            opts.device_bytes = 6 << 20;
        }
        rig_make(&rig, "norm-bits", opts);
        LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        double found = norm(&rig);
        LH_CHECK(i == 0 || memcmp(&found, &expected, sizeof(found)) == 0);
        expected = found;
        rig_unmake(&rig);
    }
}

static void test_not_finite(void)
{
    static const float values[] = {INFINITY, -INFINITY, NAN, 1e30f};
    struct rig rig;
    lh_test_name("an infinite or undefined gradient makes the norm so, a large one does not; and "
                 "nothing has changed when the step is given up");
    rig_make(&rig, "norm-finite", opts_norm);
    for (size_t i = 0; i < LH_COUNT_OF(values); i++) {
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
        rig_handles_drop(&rig);
        for (uint32_t param = 2; param < 4; param++) { /* these gradients are in fp32 */
            ((float *)rig.gradients[param])[17] = values[i];
            LH_CHECK(lh_engine_gradient(rig.engine, param, rig.gradients[param], LH_DTYPE_F32) ==
                     0);
        }
        double found = norm(&rig);
        bool is_infinite = isinf(found) && found > 0;
        LH_CHECK(i < 2 ? is_infinite : i == 2 ? isnan(found) : isfinite(found) && found > 1e60);
        LH_CHECK(rig_abort(&rig) == 0);
        ((float *)rig.gradients[2])[17] = 0;
        ((float *)rig.gradients[3])[17] = 0;
    }
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_finish(&rig);
}

/* --- When it is summed ------------------------------------------------------------------------ */

static uint32_t summed_count(const struct rig *rig)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        count += rig->engine->units[i].parts->norm.state == LH_NORM_STATE_DONE;
    return count;
}

static void test_when(void)
{
    lh_test_name("units are summed as they become complete if norms are expected, from the step "
                 "after the first question on, or if their gradients go to SSD; else when asked");
    for (int i = 0; i < 3; i++) {
        struct rig rig;
        struct rig_opts opts = opts_norm;
        opts.norms = i == 1;
        opts.least_memory = i == 2;
        opts.plain_gradients = true;
        rig_make(&rig, "norm-when", opts);
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_over(&rig);
        LH_CHECK(summed_count(&rig) == 0); /* the step is over */
        /* unit 0 lacks one gradient, unit 4 has none */
        LH_CHECK(rig_forward_backward(&rig, 0xad) == 0);
        rig_settle(&rig);
        LH_CHECK(summed_count(&rig) == (i == 0 ? 0 : 3));
        double found = norm(&rig);
        LH_CHECK(fabs(found - reference(&rig, 0xad)) <= 1e-13 * found);
        LH_CHECK(summed_count(&rig) == 4);
        LH_CHECK(rig_close(&rig, 0xad) == 0);
        rig_over(&rig);
        LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_settle(&rig);
        LH_CHECK(summed_count(&rig) == RIG_UNIT_COUNT - 1);
        LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_over_as_planned(&rig);
        rig_finish(&rig);
    }
}

static void test_asked_twice(void)
{
    struct rig rig;
    double first = 0;
    double again = 0;
    lh_test_name("a question whose caller gave up is answered once, and a second one the same");
    rig_make(&rig, "norm-twice", opts_norm);
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    for (int i = 0; i < 3; i++)
        LH_CHECK(lh_norm_wait(rig.engine, &first, 0) == 0);
    LH_CHECK(atomic_load(&rig.engine->requests[LH_REQUEST_NORM].sent) == 1);
    rig_settle(&rig);
    LH_CHECK(lh_norm_wait(rig.engine, &first, 0) == 1);
    LH_CHECK(atomic_load(&rig.engine->requests[LH_REQUEST_NORM].sent) == 1);
    again = norm(&rig);
    LH_CHECK(memcmp(&first, &again, sizeof(first)) == 0);
    LH_CHECK(fabs(first - reference(&rig, RIG_GRADIENTS_ALL)) <= 1e-13 * first);
    LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_over_as_planned(&rig);

    lh_test_name("the norm of the next step does not count the step before");
    LH_CHECK(rig_forward_backward(&rig, 0x20) == 0);
    again = norm(&rig);
    LH_CHECK(again < first && fabs(again - reference(&rig, 0x20)) <= 1e-13 * again);
    LH_CHECK(rig_close(&rig, 0x20) == 0);
    rig_finish(&rig);
}

static void test_update_waits(void)
{
    struct rig rig;
    struct rig_opts opts = opts_norm;
    lh_test_name("an update waits until its unit's gradients are summed");
    opts.norms = true;
    opts.schedule = LH_ENGINE_SCHEDULE_SERIAL;
    rig_make(&rig, "norm-waits", opts);
    LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
    rig_settle(&rig);
    rig_hypers_set(&rig);
    rig.holds.jobs = true; /* everything that has to be read was read and checked */
    rig_handles_drop(&rig);
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
        if (i != 4)
            LH_CHECK(lh_engine_gradient(rig.engine, i, rig.gradients[i],
                                        rig_gradient_dtype(&rig, i)) == 0);
    }
    LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_settle(&rig);
    LH_CHECK(rig.engine->updates.count == RIG_UNIT_COUNT - 1); /* all of them are queued */
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        const struct lh_unit *unit = &rig.engine->units[i];
        LH_CHECK(unit->state == LH_UNIT_STATE_READY && unit->update.chunks_computed == 0);
        LH_CHECK(unit->parts->norm.state ==
                 (unit->desc->elements > 0 ? LH_NORM_STATE_RUNNING : LH_NORM_STATE_NONE));
    }
    rig.holds.jobs = false;
    rig_over_as_planned(&rig);
    rig_finish(&rig);
}

static void test_scale(void)
{
    struct rig rig;
    lh_test_name("the factor multiplies the gradients of its own step alone");
    rig_make(&rig, "norm-scale", opts_norm);
    for (int i = 0; i < 4; i++) {
        const double scale = i == 1 ? 0.25 : 1;
        /* in fp32, a quarter of the gradient is exact */
        LH_CHECK(rig_forward_backward(&rig, 0x0c) == 0);
        if (i == 1)
            lh_engine_gradient_scale_set(rig.engine, scale);
        rig_settle(&rig);
        /* The reference is computed by rig_close(), before the engine moves again. */
        for (uint32_t param = 2; param < 4; param++) {
            for (uint64_t j = 0; j < rig.params[param].count; j++)
                ((float *)rig.gradients[param])[j] *= (float)scale;
        }
        LH_CHECK(rig_close(&rig, 0x0c) == 0);
        for (uint32_t param = 2; param < 4; param++) {
            for (uint64_t j = 0; j < rig.params[param].count; j++)
                ((float *)rig.gradients[param])[j] /= (float)scale;
        }
        rig_over_as_planned(&rig);
    }
    rig_finish(&rig);
}

static void test_abort(void)
{
    struct rig rig;
    lh_test_name("an abort after the question, or before a sum is there, leaves nothing of it");
    rig_make(&rig, "norm-abort", opts_norm);
    for (uint32_t rounds = 0; rounds < 12; rounds++) {
        double found = 0;
        LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        if (rounds % 2)
            LH_CHECK(lh_norm_wait(rig.engine, &found, 0) == 0);
        for (uint32_t i = 0; i < rounds; i++)
            rig_poll(&rig);
        LH_CHECK(rig_abort(&rig) == 0);
        rig_settle(&rig);
        LH_CHECK(summed_count(&rig) == 0 && !rig.engine->norm->is_asked);
    }
    LH_CHECK(rig_forward_backward(&rig, 0x20) == 0);
    double found = norm(&rig);
    LH_CHECK(fabs(found - reference(&rig, 0x20)) <= 1e-13 * found);
    LH_CHECK(rig_close(&rig, 0x20) == 0);
    rig_finish(&rig);
}

static void test_refused(void)
{
    struct rig rig;
    struct lh_engine *engine = NULL;
    struct lh_error err = {0};
    lh_test_name("norms are refused with a schedule whose updates do not all wait");
    rig_make(&rig, "norm-refused", opts_norm);
    for (int i = 0; i < LH_ENGINE_SCHEDULE_COUNT; i++) {
        struct lh_engine_opts opts = rig_engine_opts(&rig);
        struct lh_alloc alloc = LH_ALLOC_INIT;
        opts.schedule = (enum lh_engine_schedule)i;
        opts.norms = true;
        int rc = lh_engine_create(&opts, &alloc, &engine, &err);
        bool may = i == LH_ENGINE_SCHEDULE_SERIAL || i == LH_ENGINE_SCHEDULE_DEFERRED;
        LH_CHECK(rc == (may ? 0 : -EINVAL));
        LH_CHECK(may || strstr(err.message, "every update to be deferred"));
        lh_engine_destroy(engine);
        LH_CHECK(alloc.live_count == 0);
    }
    rig_unmake(&rig);
}

int main(void)
{
    struct rig_opts opts = opts_norm;
    test_value(opts, "in memory");
    opts.least_memory = true;
    test_value(opts, "some on SSD");
    opts.plain_gradients = true;
    test_value(opts, "all on SSD");
    opts.norms = true;
    test_value(opts, "summed in backward");
    test_same_bits();
    test_not_finite();
    test_when();
    test_asked_twice();
    test_update_waits();
    test_scale();
    test_abort();
    test_refused();
    return 0;
}
