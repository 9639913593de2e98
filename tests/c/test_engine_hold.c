/* Test commits that are held while another process reads the committed step. */
#include <string.h>

#include "engine_fixture.h"
#include "lh_test.h"

static void hold(struct rig *rig)
{
    int rc = 0;
    for (int i = 0; rc == 0 && i < 600; i++)
        rc = lh_engine_commit_hold(rig->engine, 100);
    LH_CHECK(rc == 1);
}

static void over(struct rig *rig)
{
    int rc = 0;
    for (int i = 0; rc == 0 && i < 600; i++)
        rc = lh_engine_over_wait(rig->engine, 100);
    LH_CHECK(rc == 1);
}

/* A second store over the same files, as who copies opens it, has every array of step. */
static void check_view(struct rig *rig, uint64_t step)
{
    static char paths[4][LH_STORE_PATH_BYTES_MAX];
    const char *names[4];
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_error err = {0};
    struct lh_store *own = rig->store;
    struct lh_store_open_opts opts = {
        .directories = names, .read_only = true, .is_held = true, .allow_buffered = true};
    opts.directory_count = lh_store_file_count(own);
    for (uint32_t i = 0; i < opts.directory_count; i++) {
        snprintf(paths[i], sizeof(paths[i]), "%s", lh_store_file_path(own, i));
        *strrchr(paths[i], '/') = '\0';
        names[i] = paths[i];
    }
    LH_CHECK(lh_store_open(&opts, &alloc, &rig->store, &err) == 0);
    LH_CHECK(lh_store_step(rig->store) == step);
    rig_check_store(rig, step);
    lh_store_close(rig->store);
    LH_CHECK(alloc.live_count == 0);
    rig->store = own;
}

static void check_bytes(struct rig *rig, bool commits)
{
    struct lh_engine_step_stats stats;
    over(rig);
    LH_CHECK(lh_engine_stats(rig->engine, &stats) && stats.step == rig->step);
    for (int i = 0; i < LH_ENGINE_LINK_COUNT; i++)
        LH_CHECK(stats.bytes[i] == stats.planned_bytes[i]);
    LH_CHECK((stats.bytes[LH_ENGINE_LINK_COMMIT_WRITE] > 0) == commits);
}

static void test_stays(uint64_t commit_every, bool least_memory, uint32_t directory_count)
{
    struct rig rig;
    lh_test_name("while commits are held the committed step stays, bit for bit, and training "
                 "continues; the late commit comes with the next step (a commit in %d steps, "
                 "%s memory)",
                 (int)commit_every, least_memory ? "least" : "all");
    rig_make(&rig, "hold",
             (struct rig_opts){.commit_every = commit_every,
                               .least_memory = least_memory,
                               .directory_count = directory_count});
    for (int i = 0; i < 2; i++)
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_flush(&rig, true) == 0);
    hold(&rig);
    check_view(&rig, 2);
    for (int i = 0; i < 4; i++) {
        LH_CHECK(rig_step(&rig, i == 2 ? 0xad : RIG_GRADIENTS_ALL) == 0);
        check_bytes(&rig, false);
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == 0);
    }
    check_view(&rig, 2);
    lh_engine_commit_release(rig.engine);
    LH_CHECK(rig_step(&rig, 0x01) == 0);
    check_bytes(&rig, true);
    rig_shut(&rig);
    rig_reopen(&rig);
    LH_CHECK(rig.step == 7 && rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_unmake(&rig);
}

static void test_waits_for_commit(void)
{
    struct rig rig;
    lh_test_name("a hold that is asked for during a commit is granted after it");
    rig_make(&rig, "hold-commit", (struct rig_opts){.commit_every = 1});
    lh_io_faulty_arm(rig.io,
                     (struct lh_io_fault){.kind = LH_IO_FAULT_KIND_HOLD,
                                          .request_kinds = LH_IO_FAULT_ON(LH_IO_KIND_SYNC)});
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    for (int i = 0; !lh_io_faulty_has_fired(rig.io) && i < 1000 * RIG_WAIT_S; i++)
        usleep(1000);
    LH_CHECK(lh_io_faulty_has_fired(rig.io));
    LH_CHECK(lh_engine_commit_hold(rig.engine, 100) == 0);
    lh_io_faulty_release(rig.io);
    hold(&rig);
    check_view(&rig, 1);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    over(&rig);
    check_view(&rig, 1);
    lh_engine_commit_release(rig.engine);
    rig_unmake(&rig);
}

static void test_flush_waits(void)
{
    struct rig rig;
    lh_test_name("a flush that commits waits for the release, one that does not continues");
    rig_make(&rig, "hold-flush", (struct rig_opts){.commit_every = 1});
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    over(&rig);
    hold(&rig);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_flush(&rig, false) == 0);
    LH_CHECK(lh_engine_flush(rig.engine, true, 500) == 0);
    check_view(&rig, 1);
    lh_engine_commit_release(rig.engine);
    LH_CHECK(rig_flush(&rig, true) == 0);
    rig_shut(&rig);
    rig_reopen(&rig);
    LH_CHECK(rig.step == 2);
    rig_unmake(&rig);
}

static void test_spilled_gradients_wait(void)
{
    struct rig rig;
    struct lh_engine_step_stats stats;
    lh_test_name("where gradients wait in the slot that a late commit would have, the step waits "
                 "with its commit for the release, and nobody takes it for stuck");
    rig_make(&rig, "hold-spill",
             (struct rig_opts){.large = true,
                               .least_memory = true,
                               .schedule = LH_ENGINE_SCHEDULE_DEFERRED,
                               .commit_every = 1});
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    over(&rig);
    LH_CHECK(lh_engine_stats(rig.engine, &stats));
    LH_CHECK(stats.bytes[LH_ENGINE_LINK_GRADIENT_WRITE] > 0);
    hold(&rig);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == 0);
    /* longer than the time after which the engine would count as stuck */
    for (int i = 0; i < 8; i++)
        LH_CHECK(lh_engine_over_wait(rig.engine, 100) == 0);
    check_view(&rig, 1);
    lh_engine_commit_release(rig.engine);
    check_bytes(&rig, true);
    for (int i = 0; i < 2; i++)
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    over(&rig);
    rig_shut(&rig);
    rig_reopen(&rig);
    LH_CHECK(rig.step == 4);
    rig_unmake(&rig);
}

static void test_abort(void)
{
    struct rig rig;
    struct lh_error err = {0};
    lh_test_name("a step that dies while a commit is late cannot be taken back, and why is said");
    rig_make(&rig, "hold-abort", (struct rig_opts){.commit_every = 1});
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    over(&rig);
    hold(&rig);
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_flush(&rig, false) == 0);
    LH_CHECK(rig_abort(&rig) == 0); /* nothing is late yet */
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    over(&rig);
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_flush(&rig, false) == 0);
    LH_CHECK(rig_abort(&rig) == -ENOTRECOVERABLE);
    LH_CHECK(lh_engine_error(rig.engine, &err) == -ENOTRECOVERABLE);
    LH_CHECK(strstr(err.message, "snapshot") && strstr(err.message, "from step 1"));
    LH_CHECK(lh_engine_commit_hold(rig.engine, 100) == -ENOTRECOVERABLE);
    lh_engine_commit_release(rig.engine);
    rig_shut(&rig);
    rig_reopen(&rig);
    LH_CHECK(rig.step == 1);
    rig_unmake(&rig);
}

int main(void)
{
    test_stays(1, false, 1);
    test_stays(1, true, 2);
    test_stays(3, false, 2);
    test_stays(3, true, 1);
    test_waits_for_commit();
    test_flush_waits();
    test_spilled_gradients_wait();
    test_abort();
    return 0;
}
