/*
 * Test the engine on real threads and a real store, driven from C as the training thread drives it:
 * the same bits as in memory, and its behavior when disks, memory or the training thread fail.
 */
#include <math.h>

#include "compute/norm.h"
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define FAULT_STEP_COUNT 3
#define SYNC_COUNT 4 /* the syncs of a commit in one directory */

static void test_equal(const char *what, struct rig_opts opts, int step_count)
{
    static const unsigned gradients[] = {RIG_GRADIENTS_ALL, 0xad, 0x01, RIG_GRADIENTS_ALL, 0x6e};
    struct rig rig;
    lh_test_name("%s: every forward and backward sees rule_ref's bits, and the disk has them too",
                 what);
    rig_make(&rig, "equal", opts);
    for (int i = 0; i < step_count; i++) {
        LH_CHECK(rig_step(&rig, gradients[i % 5]) == 0);
        if (i % 2 == 0)
            LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == 0);
    }
    struct lh_engine_step_stats stats;
    LH_CHECK(rig_flush(&rig, false) == 0 && lh_engine_stats(rig.engine, &stats));
    LH_CHECK(stats.step == rig.step && stats.end_ns >= stats.close_ns);
    bool has_room = opts.schedule == LH_ENGINE_SCHEDULE_AUTO && !opts.least_memory;
    LH_CHECK(!has_room || (stats.deferred_units > 0 && stats.deferred_units < RIG_UNIT_COUNT - 1));
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++)
        LH_CHECK(lh_engine_param_step(rig.engine, i) == rig.param_steps[i]);
    rig_finish(&rig);
}

/* Nothing of the features that the options do not ask for is there, and questions to them work. */
static void test_plain(void)
{
    struct rig rig;
    lh_test_name("an engine without features has no state of them, and answers for them");
    rig_make(&rig, "plain", (struct rig_opts){.commit_every = 1});
    const struct lh_engine *engine = rig.engine;
    LH_CHECK(engine->features.count == 0 && !engine->idle && !engine->in_place && !engine->saved);
    LH_CHECK(!engine->sums && !engine->gather && !engine->device && !engine->landing);
    LH_CHECK(!engine->device_region && !engine->reading && !engine->tail && !engine->mates &&
             !engine->borrow);
    lh_device_policy_set(rig.engine, LH_ENGINE_DEVICE_NO_REUSE, 1); /* for accelerators only */
    LH_CHECK(lh_settle_all(rig.engine, 1000) == 1 && lh_idle_owed(rig.engine, 0) == 0);
    LH_CHECK(!lh_engine_is_reopened(rig.engine) && lh_kept_taken_bytes(rig.engine) == 0);
    LH_CHECK(lh_sum_wait(rig.engine, 1000) == 1);
    uint32_t item = 0;
    LH_CHECK(lh_saved_put(rig.engine, &rig, 1, LH_SAVED_TIER_MEMORY, &item) == -E2BIG);
    lh_given_never(rig.engine); /* no unit is given */
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_finish(&rig);
}

static void test_between_commits(void)
{
    struct rig rig;
    lh_test_name("states and parameters that stay in memory are written by the step that commits, "
                 "and by a flush");
    rig_make(&rig, "between", (struct rig_opts){.commit_every = 3});
    uint64_t whole = 0;
    for (int i = 0; i < 9; i++) {
        struct lh_engine_step_stats stats;
        /* The last one does not update all that is dirty. */
        LH_CHECK(rig_step(&rig, i == 8 ? 0x01 : RIG_GRADIENTS_ALL) == 0);
        while (lh_engine_over_wait(rig.engine, 1000) == 0) {
        }
        LH_CHECK(lh_engine_stats(rig.engine, &stats) && stats.step == (uint64_t)i + 1);
        uint64_t written =
            stats.bytes[LH_ENGINE_LINK_STATE_WRITE] + stats.bytes[LH_ENGINE_LINK_PARAM_WRITE];
        for (int j = 0; j < LH_ENGINE_LINK_COUNT; j++)
            LH_CHECK(stats.bytes[j] == stats.planned_bytes[j]);
        LH_CHECK((written > 0) == (i % 3 == 2));
        whole = i == 2 ? written : whole;
        LH_CHECK(i % 3 != 2 || written == whole);
    }
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_flush(&rig, false) == 0);
    rig_shut(&rig);
    rig_reopen(&rig);
    LH_CHECK(rig.step == 9);
    rig_finish(&rig);
}

static void test_stop(bool least_memory)
{
    struct rig rig;
    lh_test_name("stopped at any time it is at a committed step, and resumes exactly from there, "
                 "%s memory",
                 least_memory ? "least" : "all");
    rig_make(&rig, "stop", (struct rig_opts){.least_memory = least_memory, .commit_every = 3});
    for (int i = 0; i < 9; i++) {
        /* A close waits until the previous step is over; a flush reports the commit. */
        uint64_t committed = rig.step;
        for (int j = 0; j <= i % 4; j++)
            LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        committed = lh_max_u64(committed, (rig.step - 1) / 3 * 3);
        if (i % 3 == 1) {
            LH_CHECK(rig_flush(&rig, true) == 0);
            committed = rig.step;
        }
        if (i % 2 == 1)
            LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_shut(&rig);
        rig_reopen(&rig);
        LH_CHECK(rig.step >= committed);
    }
    rig_unmake(&rig);
}

/* --- The training thread ------------------------------------------------------------------- */

static void test_abort(void)
{
    struct rig rig;
    lh_test_name("an aborted step leaves no trace, however far its updates had come");
    rig_make(&rig, "abort", (struct rig_opts){.least_memory = true, .commit_every = 1});
    for (int i = 0; i < 6; i++) {
        LH_CHECK(rig_forward_backward(&rig, i % 3 == 0 ? RIG_GRADIENTS_ALL : 0x20) == 0);
        if (i % 3 == 2)
            LH_CHECK(rig_flush(&rig, false) == 0);
        LH_CHECK(rig_abort(&rig) == 0);
        LH_CHECK(lh_engine_step(rig.engine) == rig.step);
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    }
    rig_finish(&rig);
}

static void test_abort_unrecoverable(void)
{
    struct rig rig;
    struct lh_error err = {0};
    lh_test_name("an abort that would lose steps says so, and where a resume continues");
    rig_make(&rig, "abort3", (struct rig_opts){.commit_every = 3});
    for (int i = 0; i < 4; i++)
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_flush(&rig, false) == 0); /* updates have begun */
    LH_CHECK(rig_abort(&rig) == -ENOTRECOVERABLE);
    LH_CHECK(lh_engine_error(rig.engine, &err) == -ENOTRECOVERABLE);
    LH_CHECK(strstr(err.message, "step 5 failed") && strstr(err.message, "from step 3"));
    rig_shut(&rig);
    rig_reopen(&rig);
    LH_CHECK(rig.step == 3 && rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_finish(&rig);
}

static void test_abort_before_updates(void)
{
    struct rig rig;
    lh_test_name("an abort before any update began loses nothing that memory alone has");
    rig_make(&rig, "abort-dirty", (struct rig_opts){.commit_every = 100});
    for (int i = 0; i < 3; i++) {
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(rig_forward_backward(&rig, 0) == 0);
        while (lh_engine_over_wait(rig.engine, 1000) == 0) {
        }
        /* Both come before the engine may do anything about the first. */
        while (lh_engine_pause(rig.engine, 1000) == 0) {
        }
        uint32_t param = rig.units[1].param_first;
        uint32_t count = rig.units[1].param_count;
        for (uint32_t j = param; j < param + count; j++)
            LH_CHECK(lh_engine_gradient(rig.engine, j, rig.gradients[j],
                                        rig_gradient_dtype(&rig, j)) == 0);
        LH_CHECK(lh_engine_abort(rig.engine, 0) == 0);
        lh_engine_resume(rig.engine);
        LH_CHECK(rig_abort(&rig) == 0);
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    }
    LH_CHECK(rig_flush(&rig, true) == 0);
    rig_finish(&rig);
}

static void test_flush_given_up(void)
{
    struct rig rig;
    lh_test_name("a flush whose caller gave up waiting does not trip gradients, close or abort");
    rig_make(&rig, "given-up", (struct rig_opts){.commit_every = 100});
    for (int i = 0; i < 12; i++) {
        LH_CHECK(rig_step(&rig, 0x21) == 0);
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
        while (lh_engine_over_wait(rig.engine, 1000) == 0) {
        }
        LH_CHECK(lh_engine_flush(rig.engine, true, 0) >= 0);
        if (i % 3 == 0)
            LH_CHECK(rig_abort(&rig) == 0);
        for (uint32_t j = 0; j < RIG_UNIT_COUNT; j++)
            lh_engine_handle_drop(rig.engine, j);
        if (i % 3 == 1)
            LH_CHECK(rig_close(&rig, 0) == 0);
        else
            LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    }
    rig_finish(&rig);
}

static void test_refusals(void)
{
    struct rig rig;
    lh_test_name("a second gradient and a frozen parameter's are refused, and cost nothing");
    rig_make(&rig, "refusals", (struct rig_opts){.commit_every = 1});
    LH_CHECK(rig_forward_backward(&rig, 0x01) == 0);
    LH_CHECK(lh_engine_gradient(rig.engine, 0, rig.gradients[0], LH_DTYPE_F32) == -EALREADY);
    LH_CHECK(lh_engine_gradient(rig.engine, 4, rig.gradients[4], LH_DTYPE_F32) == -EINVAL);
    LH_CHECK(rig_close(&rig, 0x01) == 0);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_finish(&rig);
}

static void test_pause(void)
{
    struct rig rig;
    float value = 1234.5f;
    uint64_t scalar_bytes = 0;
    lh_test_name("what a caller writes into the paused engine's store is what the next use reads");
    rig_make(&rig, "pause", (struct rig_opts){.commit_every = 1});
    for (int i = 0; i < 3; i++) {
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(rig_flush(&rig, true) == 0);
        while (lh_engine_pause(rig.engine, 1000) == 0) {
        }
        value += 1;
        LH_CHECK(lh_store_write_sync(rig.store, rig.units[1].param_extent, 0, &value, sizeof(value),
                                     NULL) == 0);
        const void *scalars = lh_store_scalars(rig.store, &scalar_bytes);
        LH_CHECK(lh_store_commit_sync(rig.store, rig.step, scalars, scalar_bytes, NULL) == 0);
        lh_engine_invalidate(rig.engine, 1);
        lh_engine_resume(rig.engine);
        /* The second unit's parameters are stored after all of the first unit's arrays. */
        memcpy(rig.state + rig.units[0].bytes + 10 * rig.units[0].elements, &value, sizeof(value));
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == 0);
    }
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_finish(&rig);
}

/* --- Faults -------------------------------------------------------------------------------- */

static int train(struct rig *rig)
{
    for (int i = 0; i < FAULT_STEP_COUNT; i++)
        LH_TRY(rig_step(rig, RIG_GRADIENTS_ALL));
    return rig_flush(rig, true);
}

/* From now on every call returns the first error, and none of them waits. */
static void check_failed(struct rig *rig, int code, const char *text)
{
    struct lh_error err = {0};
    LH_CHECK(lh_engine_error(rig->engine, &err) == code);
    bool names_file = strstr(err.message, "lohan.data") != NULL;
    if (!names_file || !strstr(err.message, text))
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(names_file && strstr(err.message, text));
    LH_CHECK(lh_engine_begin(rig->engine, LH_ENGINE_MODE_TRAIN) == code);
    LH_CHECK(lh_engine_acquire(rig->engine, 0) == code);
    LH_CHECK(lh_engine_acquire_wait(rig->engine, 0, 1000) == code);
    LH_CHECK(lh_engine_close(rig->engine, "", 0, 1000) == code);
    LH_CHECK(lh_engine_flush(rig->engine, true, 1000) == code);
    LH_CHECK(lh_engine_abort(rig->engine, 1000) == code);
    LH_CHECK(lh_engine_pause(rig->engine, 1000) == code);
    lh_engine_resume(rig->engine);
}

/* Closed steps but the last are committed; that one may be. */
static void check_recovered(struct rig *rig)
{
    uint64_t closed = rig->step;
    rig_shut(rig);
    rig_reopen(rig);
    LH_CHECK(rig->step + 1 >= closed);
    LH_CHECK(rig_step(rig, RIG_GRADIENTS_ALL) == 0);
    rig_unmake(rig);
}

static void test_io_errors(bool least_memory, int code)
{
    uint64_t stride = lh_test_is_fast() ? 7 : 1;
    uint64_t round_count = 0;
    lh_test_name(
        "the N-th request fails (%s), for every N: all waits end with its error and names, "
        "%s",
        strerror(-code), least_memory ? "least memory" : "all memory");
    for (uint64_t after = 0;; after += stride) {
        struct rig rig;
        struct lh_io_fault fault = {.kind = LH_IO_FAULT_KIND_ERROR, .after = after, .code = code};
        rig_make(
            &rig, "errors",
            (struct rig_opts){.least_memory = least_memory, .commit_every = 1, .in_memory = true});
        lh_io_faulty_arm(rig.io, fault);
        int rc = train(&rig);
        round_count++;
        if (rc == 0) {
            rig_shut(&rig); /* the engine's thread has ended, so no other thread reads the fault */
            rig_reopen(&rig);
            LH_CHECK(rig.step == FAULT_STEP_COUNT);
            rig_unmake(&rig);
            break;
        }
        LH_CHECK(rc == code);
        check_failed(&rig, code, strerror(-code));
        check_recovered(&rig);
    }
    LH_CHECK(round_count > 60 / stride);
    printf("  %" PRIu64 " requests\n", round_count * stride);
}

/*
 * Return whether a unit was requested and granted, and the engine failed before the caller waited.
 */
static bool grant_then_fail(struct rig *rig)
{
    struct lh_io_fault fault = {.kind = LH_IO_FAULT_KIND_ERROR,
                                .request_kinds = LH_IO_FAULT_ON(LH_IO_KIND_SYNC),
                                .code = -EIO};
    LH_CHECK(rig_step(rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(lh_engine_begin(rig->engine, LH_ENGINE_MODE_EVAL) == 0);
    if (lh_engine_acquire(rig->engine, 1) == 1) {
        lh_engine_unpin(rig->engine, 1);
        return false;
    }
    while (lh_engine_pin_count(rig->engine, 1) == 0) {
    }
    lh_io_faulty_arm(rig->io, fault);
    LH_CHECK(rig_flush(rig, true) == -EIO);
    return true;
}

static void test_granted_and_failed(void)
{
    lh_test_name("a unit that was granted before the engine failed is not handed out after it");
    bool has_failed = false;
    for (int i = 0; i < 100 && !has_failed; i++) {
        struct rig rig;
        rig_make(&rig, "granted",
                 (struct rig_opts){.least_memory = true, .commit_every = 100, .in_memory = true});
        has_failed = grant_then_fail(&rig);
        if (has_failed)
            LH_CHECK(lh_engine_acquire_wait(rig.engine, 1, 1000) == -EIO);
        rig_shut(&rig);
        rig_reopen(&rig);
        rig_unmake(&rig);
    }
    LH_CHECK(has_failed);
}

static void test_commit_errors(void)
{
    lh_test_name(
        "each failed sync of a commit fails the engine, and says what is known of the step");
    for (uint64_t i = 0; i < SYNC_COUNT; i++) {
        struct rig rig;
        struct lh_error err = {0};
        rig_make(&rig, "commit", (struct rig_opts){.commit_every = 1, .in_memory = true});
        lh_io_faulty_arm(rig.io,
                         (struct lh_io_fault){.kind = LH_IO_FAULT_KIND_ERROR,
                                              .request_kinds = LH_IO_FAULT_ON(LH_IO_KIND_SYNC),
                                              .after = i,
                                              .code = -EIO});
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(rig_flush(&rig, true) == -EIO);
        LH_CHECK(lh_engine_error(rig.engine, &err) == -EIO);
        LH_CHECK(strstr(err.message, "commit of step 1: cannot sync ") != NULL);
        /* The last two are those of the superblock's copies. */
        const char *known = i < SYNC_COUNT - 2 ? "the store is still at step 0" : "is unknown";
        LH_CHECK(strstr(err.message, known) != NULL);
        LH_CHECK(lh_io_faulty_has_fired(rig.io));
        rig_shut(&rig);
        rig_reopen(&rig);
        rig_unmake(&rig);
    }
}

static void test_short(void)
{
    lh_test_name("the N-th request moves only its first bytes at once, and nobody notices");
    for (uint64_t after = 0; after < 120; after += lh_test_is_fast() ? 40 : 9) {
        struct rig rig;
        struct lh_io_fault fault = {
            .kind = LH_IO_FAULT_KIND_SHORT, .after = after, .bytes = LH_BLOCK_BYTES};
        rig_make(&rig, "short",
                 (struct rig_opts){.least_memory = true, .commit_every = 1, .in_memory = true});
        lh_io_faulty_arm(rig.io, fault);
        LH_CHECK(train(&rig) == 0);
        rig_finish(&rig);
    }
}

/* Deferred updates with the least memory: gradients wait on SSD and are read back. */
static void test_flip(enum lh_engine_schedule schedule, uint64_t stride)
{
    uint64_t found_count = 0;
    uint64_t found_gradient_count = 0;
    uint64_t unused_count = 0;
    bool is_deferred = schedule == LH_ENGINE_SCHEDULE_DEFERRED;
    lh_test_name("one wrong bit in the N-th read is found, for every N, unless nobody uses it%s",
                 is_deferred ? ", in gradients that wait on SSD, too" : "");
    for (uint64_t after = 0;; after += stride) {
        struct rig rig;
        struct lh_io_fault fault = {
            .kind = LH_IO_FAULT_KIND_FLIP, .after = after, .bit = 4099 * after};
        rig_make(
            &rig, "flip",
            (struct rig_opts){
                .least_memory = true, .schedule = schedule, .commit_every = 1, .in_memory = true});
        lh_io_faulty_arm(rig.io, fault);
        int rc = train(&rig);
        if (rc < 0) {
            struct lh_error err = {0};
            LH_CHECK(rc == -EILSEQ && lh_engine_error(rig.engine, &err) == rc);
            found_gradient_count += strstr(err.message, "gradients read") != NULL;
            check_failed(&rig, -EILSEQ, "checksum");
            check_recovered(&rig);
            found_count++;
            continue;
        }
        /* Read ahead for a step that does not come: what is on disk is right. */
        lh_engine_stop(rig.engine);
        bool has_fired = lh_io_faulty_has_fired(rig.io);
        unused_count += has_fired;
        rig_shut(&rig);
        rig_reopen(&rig);
        LH_CHECK(rig.step == FAULT_STEP_COUNT);
        rig_unmake(&rig);
        if (!has_fired)
            break;
    }
    printf("  %" PRIu64 " found, %" PRIu64 " of gradients, %" PRIu64 " not used\n", found_count,
           found_gradient_count, unused_count);
    LH_CHECK(found_count > (lh_test_is_fast() ? 2 : 15) && unused_count < 10);
    /* How many gradients have to wait on SSD depends on how fast the workers are. */
    LH_CHECK(!is_deferred || found_gradient_count > 0);
}

static void test_allocations(void)
{
    struct rig rig;
    struct lh_engine *engine = NULL;
    struct lh_alloc alloc = LH_ALLOC_INIT;
    int64_t round_count = 0;
    lh_test_name(
        "the N-th allocation fails, for every N: no engine, an error, and nothing is left");
    rig_make(&rig, "allocations", (struct rig_opts){.commit_every = 1});
    struct lh_engine_opts opts = rig_engine_opts(&rig);
    opts.manual = true; /* the rig's engine owns the store; this one is never polled */
    for (;; round_count++) {
        struct lh_error err = {0};
        alloc.fail_after = round_count;
        int rc = lh_engine_create(&opts, &alloc, &engine, &err);
        if (rc == 0)
            break;
        LH_CHECK(rc == -ENOMEM && err.code == -ENOMEM && err.message[0] != '\0');
        LH_CHECK(engine == NULL && alloc.live_count == 0);
    }
    lh_engine_destroy(engine);
    LH_CHECK(alloc.live_count == 0 && round_count > 20);
    opts.io_depth = 0;
    LH_CHECK(lh_engine_create(&opts, &alloc, &engine, NULL) == -EINVAL && engine == NULL);
    opts = rig_engine_opts(&rig);
    opts.memory_bytes = rig.budget.region_bytes;
    LH_CHECK(lh_engine_create(&opts, &alloc, &engine, NULL) == -EINVAL && engine == NULL);
    LH_CHECK(alloc.live_count == 0);
    rig_unmake(&rig);
}

static void test_equal_schedules(void)
{
    static const char *const names[LH_ENGINE_SCHEDULE_COUNT] = {"optimized", "serial", "naive",
                                                                "deferred", "auto"};

    for (int schedule = 0; schedule < LH_ENGINE_SCHEDULE_COUNT; schedule++) {
        for (int least = 0; least < 2; least++) {
            if (lh_test_is_sample() && least != schedule % 2)
                continue;
            struct rig_opts opts = {.large = true,
                                    .least_memory = least != 0,
                                    .schedule = (enum lh_engine_schedule)schedule,
                                    .commit_every = 1};

            test_equal(names[schedule], opts, 4);
        }
    }
}

/* The sum is computed here; the rig keeps the gradients until its next ones. */
static double square_sum(const struct rig *rig, unsigned gradients)
{
    double sum = 0;
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
        if (gradients & (1u << i))
            sum += lh_norm_square_sum(rig->gradients[i], rig_gradient_dtype(rig, i),
                                      rig->params[i].count);
    }
    return sum;
}

static void test_norms(bool least_memory)
{
    static const unsigned gradients[] = {RIG_GRADIENTS_ALL, 0xad, RIG_GRADIENTS_ALL,
                                         RIG_GRADIENTS_ALL, 0x6e};
    struct rig rig;
    lh_test_name("the norm is that of the step's gradients, asked in some steps or never, %s",
                 least_memory ? "least memory" : "all memory");
    rig_make(&rig, "norms",
             (struct rig_opts){.large = true,
                               .least_memory = least_memory,
                               .schedule = LH_ENGINE_SCHEDULE_DEFERRED,
                               .commit_every = 1});
    for (unsigned i = 0; i < LH_COUNT_OF(gradients); i++) {
        double found = 0;
        LH_CHECK(rig_forward_backward(&rig, gradients[i]) == 0);
        while (i % 2 && lh_norm_wait(rig.engine, &found, 1000) == 0)
            continue;
        double expected = i % 2 ? square_sum(&rig, gradients[i]) : 0;
        LH_CHECK(fabs(found - expected) <= 1e-12 * expected);
        LH_CHECK(rig_close(&rig, gradients[i]) == 0);
    }
    rig_finish(&rig);
}

int main(void)
{
    test_equal("all memory", (struct rig_opts){.commit_every = 1}, 10);
    test_equal("all memory, a commit in three steps", (struct rig_opts){.commit_every = 3}, 10);
    test_equal("all memory, a commit in ten steps", (struct rig_opts){.commit_every = 10}, 8);
    uint64_t spare_step_bytes = lh_test_is_sample() ? 75000 : 15000;
    for (uint64_t spare_bytes = 0; spare_bytes < 600000; spare_bytes += spare_step_bytes) {
        struct rig_opts opts = {
            .least_memory = true, .spare_bytes = spare_bytes, .commit_every = 4, .in_memory = true};
        test_equal("slabs for all chunks before the region has room for all units", opts, 7);
    }
    test_equal("least memory", (struct rig_opts){.least_memory = true, .commit_every = 1}, 10);
    test_equal("least memory, room beside each unit",
               (struct rig_opts){
                   .least_memory = true, .beside_bytes = 3 * LH_BLOCK_BYTES, .commit_every = 1},
               10);
    test_equal("two directories, a commit in three steps",
               (struct rig_opts){.least_memory = true, .commit_every = 3, .directory_count = 2},
               10);
    test_equal_schedules();
    test_equal("several chunks", (struct rig_opts){.large = true, .commit_every = 1}, 3);
    test_equal("several chunks, least memory",
               (struct rig_opts){.large = true, .least_memory = true, .commit_every = 1}, 3);
    test_stop(true);
    test_stop(false);
    test_plain();
    test_between_commits();
    test_abort();
    test_abort_unrecoverable();
    test_abort_before_updates();
    test_flush_given_up();
    test_norms(true);
    test_norms(false);
    test_refusals();
    test_pause();
    test_io_errors(true, -EIO);
    test_io_errors(true, -ENOSPC);
    test_granted_and_failed();
    test_commit_errors();
    test_io_errors(false, -EIO);
    test_short();
    test_flip(LH_ENGINE_SCHEDULE_OPTIMIZED, lh_test_is_fast() ? 5 : 1);
    test_flip(LH_ENGINE_SCHEDULE_DEFERRED, lh_test_is_fast() ? 2 : 1);
    test_allocations();
    return 0;
}
