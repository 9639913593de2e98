/*
 * Test what a commit carries beside the states: its layout, that nothing else is mistaken for it,
 * and that an engine continues from it.
 */
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define HEADER_BYTES 24 /* magic, number of parameters, number of the caller's bytes */
#define STEP_COUNT_MAX 5
#define CALLER_BYTES_MAX 40

struct scalars {
    uint8_t bytes[HEADER_BYTES + STEP_COUNT_MAX * 8 + CALLER_BYTES_MAX];
    uint64_t count;
};

static struct scalars scalars_make(uint32_t param_count, const uint64_t *steps, const void *caller,
                                   uint64_t caller_bytes)
{
    struct scalars scalars = {.count = lh_scalars_overhead_bytes(param_count) + caller_bytes};
    LH_CHECK(scalars.count <= sizeof(scalars.bytes));
    lh_scalars_make(steps, param_count, caller, caller_bytes, scalars.bytes);
    return scalars;
}

static void word_set(struct scalars *scalars, uint32_t index, uint64_t value)
{
    memcpy(scalars->bytes + 8 * (uint64_t)index, &value, sizeof(value));
}

static uint64_t word_get(const void *bytes, uint64_t index)
{
    uint64_t value = 0;
    memcpy(&value, (const uint8_t *)bytes + 8 * index, sizeof(value));
    return value;
}

static bool is_found(const struct scalars *scalars, uint64_t count)
{
    uint64_t bytes = 1;
    const void *found = lh_scalars_find(scalars->bytes, count, &bytes);
    LH_CHECK(found || bytes == 0);
    return found != NULL;
}

static void test_round_trip(void)
{
    uint64_t steps[STEP_COUNT_MAX];
    uint8_t caller[CALLER_BYTES_MAX];
    uint64_t seed = 5;
    lh_test_name("the caller's bytes are found as they were put, after a word for each parameter");
    for (uint32_t i = 0; i < STEP_COUNT_MAX; i++)
        steps[i] = lh_test_random(&seed);
    for (uint32_t i = 0; i < CALLER_BYTES_MAX; i++)
        caller[i] = (uint8_t)lh_test_random(&seed);
    for (uint32_t count = 0; count <= STEP_COUNT_MAX; count++) {
        LH_CHECK(lh_scalars_overhead_bytes(count) == HEADER_BYTES + 8 * count);
        for (uint64_t bytes = 0; bytes <= CALLER_BYTES_MAX; bytes++) {
            struct scalars scalars = scalars_make(count, steps, caller, bytes);
            uint64_t found_bytes = UINT64_MAX;
            const uint8_t *found = lh_scalars_find(scalars.bytes, scalars.count, &found_bytes);
            LH_CHECK(found == scalars.bytes + HEADER_BYTES + 8 * (uint64_t)count);
            LH_CHECK(found_bytes == bytes && memcmp(found, caller, bytes) == 0);
            LH_CHECK(memcmp(scalars.bytes + HEADER_BYTES, steps, 8 * (uint64_t)count) == 0);
        }
    }
    LH_CHECK(lh_scalars_overhead_bytes(UINT32_MAX) == HEADER_BYTES + UINT64_C(0x7fffffff8));
}

static void test_damaged(void)
{
    const uint64_t steps[STEP_COUNT_MAX] = {1, 2, 3, 4, 5};
    lh_test_name("scalars that were cut, lengthened or changed in their header are not scalars");
    const struct scalars good = scalars_make(3, steps, "0123456789", 10);
    LH_CHECK(is_found(&good, good.count));
    for (uint64_t count = 0; count < good.count; count++)
        LH_CHECK(!is_found(&good, count));
    for (uint64_t count = good.count + 1; count <= sizeof(good.bytes); count++)
        LH_CHECK(!is_found(&good, count));
    uint64_t bytes = 7;
    LH_CHECK(!lh_scalars_find(NULL, good.count, &bytes) && bytes == 0);
    for (uint32_t bit = 0; bit < 8 * HEADER_BYTES; bit++) {
        struct scalars bad = good;
        bad.bytes[bit / 8] ^= (uint8_t)(1U << (bit % 8));
        LH_CHECK(!is_found(&bad, bad.count));
    }
}

static void test_sizes(void)
{
    const uint64_t steps[STEP_COUNT_MAX] = {1, 2, 3, 4, 5};
    lh_test_name("counts that only fit if a sum or a product overflows are refused");
    const struct scalars good = scalars_make(2, steps, "caller", 6);
    const uint64_t counts[] = {UINT32_MAX, UINT64_C(1) << 32, (UINT64_C(1) << 32) + 2,
                               (UINT64_C(1) << 61) + 2, UINT64_MAX};
    for (size_t i = 0; i < LH_COUNT_OF(counts); i++) {
        struct scalars bad = good;
        word_set(&bad, 1, counts[i]);
        LH_CHECK(!is_found(&bad, bad.count));
        /* The caller's bytes would make up for it, modulo 2^64. */
        word_set(&bad, 2, bad.count - HEADER_BYTES - 8 * counts[i]);
        LH_CHECK(!is_found(&bad, bad.count));
    }
    struct scalars bad = good;
    word_set(&bad, 2, UINT64_MAX);
    LH_CHECK(!is_found(&bad, bad.count));
    word_set(&bad, 1, 3); /* a different split of the same size: the last two bytes are missing */
    word_set(&bad, 2, UINT64_MAX - 1);
    LH_CHECK(!is_found(&bad, bad.count));
}

/* --- In an engine ----------------------------------------------------------------------------- */

static void test_commit(void)
{
    static const unsigned gradients[] = {RIG_GRADIENTS_ALL, 0x21, 0x05, 0x60};
    struct rig rig;
    lh_test_name("a commit carries the step counts of that step and the caller's newest bytes, and "
                 "an engine continues with them");
    rig_make(&rig, "scalars",
             (struct rig_opts){.manual = true, .in_memory = true, .commit_every = 2});
    for (size_t i = 0; i < LH_COUNT_OF(gradients); i++) {
        LH_CHECK(rig_step(&rig, gradients[i]) == 0);
        rig_over(&rig);
        uint64_t bytes = 0;
        const uint8_t *scalars = lh_store_scalars(rig.store, &bytes);
        if (i % 2 == 0)
            continue; /* this step does not commit */
        uint64_t caller_bytes = 0;
        const char *caller = lh_scalars_find(scalars, bytes, &caller_bytes);
        LH_CHECK(caller && caller_bytes == sizeof("of the caller"));
        LH_CHECK(strcmp(caller, "of the caller") == 0);
        LH_CHECK(word_get(scalars, 1) == RIG_PARAM_COUNT);
        for (uint32_t j = 0; j < RIG_PARAM_COUNT; j++)
            LH_CHECK(word_get(scalars + HEADER_BYTES, j) == rig.param_steps[j]);
    }
    uint64_t steps[RIG_PARAM_COUNT];
    memcpy(steps, rig.param_steps, sizeof(steps));
    rig_shut(&rig);
    rig_reopen(&rig);
    LH_CHECK(rig.step == LH_COUNT_OF(gradients));
    LH_CHECK(memcmp(steps, rig.param_steps, sizeof(steps)) == 0);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_finish(&rig);
}

static void test_too_large(void)
{
    struct rig rig;
    uint8_t caller[65] = {0};
    lh_test_name("a close whose bytes have no room is refused, and the step stays open");
    rig_make(&rig, "scalars-large",
             (struct rig_opts){.manual = true, .in_memory = true, .commit_every = 1});
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(lh_engine_close(rig.engine, caller, sizeof(caller), 0) == -E2BIG);
    LH_CHECK(lh_engine_step(rig.engine) == 0 && lh_engine_error(rig.engine, NULL) == 0);
    LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(lh_engine_over_wait(rig.engine, 0) == 0);
    rig_over(&rig);
    rig_forward_backward(&rig, 0);
    /* exactly the maximum */
    LH_CHECK(lh_engine_close(rig.engine, caller, sizeof(caller) - 1, 0) == 1);
    rig_settle(&rig);
    LH_CHECK(lh_engine_over_wait(rig.engine, 0) == 1);
    rig_unmake(&rig);
}

static int create(struct rig *rig, uint32_t param_count, struct lh_error *err)
{
    struct lh_engine_param params[64];
    struct lh_engine *engine = NULL;
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_engine_opts opts = rig_engine_opts(rig);
    LH_CHECK(param_count <= LH_COUNT_OF(params));
    for (uint32_t i = 0; i < param_count; i++)
        params[i] = rig->params[i < RIG_PARAM_COUNT ? i : 0];
    opts.params = params;
    opts.param_count = param_count;
    int rc = lh_engine_create(&opts, &alloc, &engine, err);
    lh_engine_destroy(engine);
    LH_CHECK((rc == 0) == (engine != NULL) && alloc.live_count == 0);
    return rc;
}

static void test_other_models(void)
{
    struct rig rig;
    struct lh_error err = {0};
    lh_test_name("an engine refuses a store whose scalars are another model's or have no room");
    rig_make(&rig, "scalars-other",
             (struct rig_opts){.manual = true, .in_memory = true, .commit_every = 1});
    LH_CHECK(create(&rig, RIG_PARAM_COUNT, &err) == 0); /* no engine has committed to it yet */
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_over(&rig);
    LH_CHECK(create(&rig, RIG_PARAM_COUNT, &err) == 0);
    LH_CHECK(create(&rig, RIG_PARAM_COUNT + 1, &err) == -EBADMSG);
    LH_CHECK(strstr(err.message, "a model with 9 parameters") != NULL);
    LH_CHECK(create(&rig, RIG_PARAM_COUNT + 8, &err) == -EBADMSG);
    LH_CHECK(strstr(err.message, "a model with 16 parameters") != NULL);
    LH_CHECK(create(&rig, RIG_PARAM_COUNT + 9, &err) == -EBADMSG);
    LH_CHECK(strstr(err.message, "room for 152 bytes") && strstr(err.message, "need 160"));
    LH_CHECK(lh_store_commit_sync(rig.store, 2, "other", 5, NULL) == 0);
    LH_CHECK(create(&rig, RIG_PARAM_COUNT, &err) == -EBADMSG);
    rig_unmake(&rig);
}

int main(void)
{
    test_round_trip();
    test_damaged();
    test_sizes();
    test_commit();
    test_too_large();
    test_other_models();
    return 0;
}
