/*
 * Test sums of gradients that an accelerator computes: their bits, their order, and that the
 * gradients' memory is read neither before they are computed nor after it was released.
 */
#include <errno.h>
#include <string.h>

#include "compute/sum_tree.h"
#include "lh_test.h"
#include "rig_device.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define ALWAYS_BYTES UINT64_C(8192)
#define LARGEST_BYTES UINT64_C(16384)
#define DEVICE_BYTES (ALWAYS_BYTES + 2 * LARGEST_BYTES)
#define BACKWARD_COUNT 5

struct sums {
    struct rig rig;
    bool is_tree; /* otherwise gradients are added in the order in which they are given */
    uint64_t leaf;
    float *found[RIG_PARAM_COUNT]; /* the sum, and with a tree further places */
    float *expected[RIG_PARAM_COUNT];
    struct lh_sum_tree trees[RIG_PARAM_COUNT];
    bool has_any[RIG_PARAM_COUNT];
};

static struct rig_opts opts_of(const char *kind, bool is_manual, bool is_large)
{
    return (struct rig_opts){
        .device = kind,
        .device_bytes = is_large ? UINT64_C(6) << 20 : DEVICE_BYTES,
        .schedule = LH_ENGINE_SCHEDULE_SERIAL,
        .least_memory = true,
        .large = is_large,
        .commit_every = 1,
        .in_memory = true,
        .plain_gradients = true,
        .sums = true,
        .manual = is_manual,
    };
}

static void sums_open(struct sums *sums, struct rig_opts opts)
{
    uint64_t places = lh_sum_tree_places(BACKWARD_COUNT);
    *sums = (struct sums){0};
    rig_make(&sums->rig, "sums", opts);
    LH_CHECK(rig_forward(&sums->rig, LH_ENGINE_MODE_TRAIN) == 0);
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
        sums->found[i] = calloc(sums->rig.params[i].count, places * sizeof(float));
        sums->expected[i] = calloc(sums->rig.params[i].count, places * sizeof(float));
        LH_CHECK(sums->found[i] && sums->expected[i]);
    }
}

static void sums_close(struct sums *sums)
{
    rig_handles_drop(&sums->rig);
    rig_unmake(&sums->rig);
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
        free(sums->found[i]);
        free(sums->expected[i]);
    }
}

static void released_wait(struct sums *sums, uint32_t param)
{
    struct rig *rig = &sums->rig;
    int rc = 0;
    rig_wait_begin(rig);
    do {
        rc = lh_sum_release_wait(rig->engine, param, rig_slice_ms(rig));
    } while (rig_waits(rig, rc));
    LH_CHECK(rc == 1);
}

static void finished_wait(struct sums *sums)
{
    struct rig *rig = &sums->rig;
    int rc = 0;
    rig_wait_begin(rig);
    do {
        rc = lh_sum_wait(rig->engine, rig_slice_ms(rig));
    } while (rig_waits(rig, rc));
    LH_CHECK(rc == 1);
}

/* Enqueue the computation of a gradient on the accelerator, and post it. */
static void give(struct sums *sums, uint32_t param, uint64_t *seed)
{
    struct rig *rig = &sums->rig;
    enum lh_dtype dtype = rig_gradient_dtype(rig, param);
    uint64_t count = rig->params[param].count;
    for (uint64_t i = 0; i < count; i++) {
        if (dtype == LH_DTYPE_F32)
            ((float *)rig->gradients[param])[i] = (float)(int32_t)lh_test_random(seed) * 0x1p-31f;
        else /* finite in both half formats */
            ((uint16_t *)rig->gradients[param])[i] = (uint16_t)lh_test_random(seed) & 0xbbbb;
    }
    struct lh_sum_join join = lh_sum_join_one(!sums->has_any[param]);
    if (sums->is_tree)
        join = lh_sum_tree_add(&sums->trees[param], sums->leaf, sums->leaf + 1 == BACKWARD_COUNT,
                               count);
    lh_sum_join(sums->expected[param], &join, rig->gradients[param], dtype, count);
    LH_CHECK(lh_sum_post(rig->engine, param, rig_device_gradient(rig, param), dtype,
                         sums->found[param], &join) == 0);
    sums->has_any[param] = true;
}

static void check(const struct sums *sums)
{
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++)
        LH_CHECK(memcmp(sums->found[i], sums->expected[i],
                        sums->rig.params[i].count * lh_sum_tree_places(BACKWARD_COUNT) *
                            sizeof(float)) == 0);
}

static bool is_trained(uint32_t param)
{
    return (RIG_GRADIENTS_ALL >> param & 1) != 0;
}

/* A gradient stays the accelerator's until the last of its copies is over. */
static void watch(struct rig *rig)
{
    uint32_t *copies_max = rig->watch_context;
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
        uint32_t copies = rig->engine->sums->params[i].copies;
        *copies_max = copies > *copies_max ? copies : *copies_max;
        LH_CHECK(copies == 0 || !lh_engine_gradient_is_consumed(rig->engine, i));
    }
}

static void test_bits(const char *kind, bool is_manual, bool is_large, bool is_tree)
{
    struct sums sums;
    uint32_t copies_max = 0;
    uint64_t seed = 3;
    lh_test_name("%s%s%s: sums have the bits of lh_sum_join in the order of %s", kind,
                 is_manual ? ", manual" : "", is_large ? ", several pieces" : "",
                 is_tree ? "a tree" : "the backwards");
    sums_open(&sums, opts_of(kind, is_manual, is_large));
    sums.is_tree = is_tree;
    sums.rig.watch = is_manual ? watch : NULL;
    sums.rig.watch_context = &copies_max;
    for (; sums.leaf < BACKWARD_COUNT; sums.leaf++) {
        for (uint32_t i = RIG_PARAM_COUNT; i-- > 0;) {
            if (!is_trained(i) || lh_test_random(&seed) % 4 == 0)
                continue;
            released_wait(&sums, i);
            give(&sums, i, &seed);
        }
    }
    finished_wait(&sums);
    check(&sums);
    LH_CHECK(atomic_load(&sums.rig.engine->update_gradient_bytes) == 0);
    LH_CHECK(!is_manual || copies_max > 1); /* else no gradient has several pieces */
    sums_close(&sums);
}

static void test_order(void)
{
    struct sums sums;
    struct rig *rig = &sums.rig;
    uint64_t seed = 4;
    lh_test_name("a gradient is copied only after the parameter's earlier one was added");
    sums_open(&sums, opts_of("emu", true, false));
    rig->holds.jobs = true;
    give(&sums, 0, &seed);
    released_wait(&sums, 0); /* the copies are over, and nothing is added yet */
    LH_CHECK(rig->engine->sums->params[0].jobs > 0);
    give(&sums, 0, &seed);
    rig_settle(rig);
    LH_CHECK(!lh_engine_gradient_is_consumed(rig->engine, 0));
    LH_CHECK(rig->engine->sums->params[0].copies == 0);
    LH_CHECK(lh_sum_wait(rig->engine, 0) == 0);
    rig->holds.jobs = false;
    finished_wait(&sums);
    check(&sums);
    sums_close(&sums);
}

static void test_heard(void)
{
    struct sums sums;
    struct rig *rig = &sums.rig;
    uint64_t seed = 5;
    lh_test_name("gradients count as held once the engine has heard of them, until their copies "
                 "are over");
    sums_open(&sums, opts_of("emu", true, false));
    rig_settle(rig);
    LH_CHECK(lh_engine_heard_wait(rig->engine, 0) == 1);
    rig->holds.copies = 1 << LH_DEV_DIRECTION_OUT;
    give(&sums, 0, &seed);
    LH_CHECK(lh_engine_gradients_fit(rig->engine, 0));
    LH_CHECK(lh_engine_heard_wait(rig->engine, 0) == 0);
    rig_settle(rig);
    LH_CHECK(lh_engine_heard_wait(rig->engine, 0) == 1);
    LH_CHECK(!lh_engine_gradients_fit(rig->engine, 0));
    rig->holds.copies = 0;
    finished_wait(&sums);
    LH_CHECK(lh_engine_gradients_fit(rig->engine, 0));
    check(&sums);
    sums_close(&sums);
}

static void test_waits(void)
{
    struct sums sums;
    uint64_t seed = 8;
    uint32_t given_count = 0;
    lh_test_name("of a gradient's pieces, only the first one waits until it is computed");
    sums_open(&sums, opts_of("emu", true, true));
    const struct rig_copies_out *copies = rig_device_count(&sums.rig);
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = RIG_PARAM_COUNT; i-- > 0;) {
            if (!is_trained(i))
                continue;
            released_wait(&sums, i);
            give(&sums, i, &seed);
            given_count++;
        }
    }
    finished_wait(&sums);
    check(&sums);
    LH_CHECK(copies->wait_count == given_count && copies->count > given_count);
    sums_close(&sums);
}

static void test_abort(const char *kind)
{
    struct sums sums;
    uint64_t seed = 6;
    lh_test_name("%s: an abort forgets the sums of its step, and later ones are whole", kind);
    sums_open(&sums, opts_of(kind, false, false));
    for (int round = 0; round < 4; round++) {
        for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
            sums.has_any[i] = false;
            if (is_trained(i))
                give(&sums, i, &seed);
        }
        if (round % 2 == 0) {
            LH_CHECK(rig_abort(&sums.rig) == 0);
            LH_CHECK(lh_sum_wait(sums.rig.engine, 0) == 1);
            rig_device_drain(&sums.rig); /* it still computes from the memory that give() fills */
            continue;
        }
        finished_wait(&sums);
        check(&sums);
    }
    sums_close(&sums);
}

static void test_refused(void)
{
    static const struct {
        uint64_t bytes;
        bool has_device;
    } rows[] = {{1, true}, {LH_BLOCK_BYTES - 1, true}, {LH_BLOCK_BYTES, false}};
    lh_test_name("an engine refuses memory for sums that is too small, or that has no device");
    for (size_t i = 0; i < LH_COUNT_OF(rows); i++) {
        struct rig_opts rig_opts = opts_of("emu", true, false);
        struct lh_alloc alloc = LH_ALLOC_INIT;
        struct lh_engine *engine = NULL;
        struct lh_error err = {0};
        struct rig rig;
        rig_opts.device = rows[i].has_device ? rig_opts.device : NULL;
        rig_opts.sums = false;
        rig_make(&rig, "sums-refused", rig_opts);
        struct lh_engine_opts opts = rig_engine_opts(&rig);
        opts.gradients_in_memory = true;
        opts.sum_memory = rig.memory;
        opts.sum_bytes = rows[i].bytes;
        LH_CHECK(lh_engine_create(&opts, &alloc, &engine, &err) == -EINVAL && !engine);
        LH_CHECK(strstr(err.message, "sum_bytes") != NULL && alloc.live_count == 0);
        rig_unmake(&rig);
    }
}

static void test_failed(void)
{
    struct sums sums;
    struct rig *rig = &sums.rig;
    uint64_t seed = 7;
    lh_test_name("a failed engine takes no gradient, and no wait for a sum hangs");
    sums_open(&sums, opts_of("emu", true, false));
    rig->holds.copies = 1 << LH_DEV_DIRECTION_OUT;
    give(&sums, 0, &seed);
    rig_settle(rig);
    struct lh_error err = {0};
    lh_error_set(&err, -EIO, "the test fails the engine");
    lh_core_fail(rig->engine, &err);
    LH_CHECK(lh_sum_wait(rig->engine, 0) == -EIO);
    LH_CHECK(lh_sum_release_wait(rig->engine, 0, 0) == -EIO);
    struct lh_sum_join join = lh_sum_join_one(true);
    LH_CHECK(lh_sum_post(rig->engine, 1, rig->gradients[1], LH_DTYPE_F32, sums.found[1], &join) ==
             -EIO);
    sums_close(&sums);
}

int main(void)
{
    static const char *const kinds[] = {"emu", "fake", "staged"};
    for (size_t i = 0; i < LH_COUNT_OF(kinds); i++) {
        test_bits(kinds[i], false, false, false);
        test_bits(kinds[i], false, true, false);
        test_bits(kinds[i], false, false, true);
        test_abort(kinds[i]);
    }
    test_bits("emu", true, false, false);
    test_bits("emu", true, true, false);
    test_bits("emu", true, true, true);
    test_order();
    test_waits();
    test_heard();
    test_refused();
    test_failed();
    return 0;
}
