/* Test a frozen unit that is read in place from its files: what is read, checked and refused. */
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_in_place.h"
#include "rig_wait.h"
#include "sched/engine_private.h"
#include "store_fixture.h"

#define STEP_COUNT 3

static void test_bytes(void)
{
    static const enum lh_engine_schedule schedules[] = {LH_ENGINE_SCHEDULE_OPTIMIZED,
                                                        LH_ENGINE_SCHEDULE_DEFERRED};
    for (uint32_t i = 0; i < 36; i++) {
        struct rig rig;
        struct rig_opts opts = {
            .commit_every = 1,
            .in_place = true,
            .packed = i / 12 != 1,
            .kept = i / 12 == 2,
            .in_place_large = i % 12 / 8 != 0,
            .skip_verify = i % 3 == 0,
            .least_memory = i % 2 != 0,
            .schedule = schedules[i / 2 % 2],
            .device = i % 12 / 4 % 2 != 0 ? "emu" : NULL,
            .device_bytes = i % 12 / 4 % 2 != 0 ? LH_GIB / 16 : 0,
        };
        lh_test_name("a unit in files of others is there, aligned, at each use (%u)", i);
        rig_make(&rig, "in-place", opts);
        for (int j = 0; j < STEP_COUNT; j++)
            LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(rig_flush(&rig, true) == 0);
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == 0);
        struct lh_engine_step_stats stats;
        LH_CHECK(lh_engine_stats(rig.engine, &stats));
        for (int j = 0; j < LH_ENGINE_LINK_COUNT; j++)
            LH_CHECK(stats.bytes[j] == stats.planned_bytes[j]);
        rig_unmake(&rig);
    }
}

static void test_kept_once(bool has_device)
{
    struct rig rig;
    lh_test_name("packed bytes are kept from the second load on, and not read again (%d)",
                 has_device);
    rig_make(&rig, "kept-once",
             (struct rig_opts){.commit_every = 1,
                               .in_place = true,
                               .packed = true,
                               .kept = true,
                               .least_memory = true,
                               .device = has_device ? "emu" : NULL,
                               .device_bytes = has_device ? LH_GIB / 16 : 0});
    const struct lh_unit *unit = &rig.engine->units[2];
    for (int j = 0; j < STEP_COUNT; j++)
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_flush(&rig, true) == 0);
    if (has_device) { /* the unit stays there, so it is loaded once */
        LH_CHECK(atomic_load(&unit->shared.load_count) == 1 && !unit->parts->in_place.kept);
        rig_unmake(&rig);
        return;
    }
    uint32_t load_count = atomic_load(&unit->shared.load_count);
    LH_CHECK(load_count >= 2 && unit->parts->in_place.kept);
    rig_in_place_spoil(&rig); /* the file must not be read any more */
    for (int j = 0; j < STEP_COUNT; j++)
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_flush(&rig, true) == 0);
    LH_CHECK(atomic_load(&unit->shared.load_count) > load_count);
    rig_unmake(&rig);
}

static void test_kept_through_abort(void)
{
    struct rig rig;
    lh_test_name(
        "an abort leaves packed bytes that are kept, and loads that use them, as they are");
    rig_make(&rig, "kept-abort",
             (struct rig_opts){.commit_every = 1,
                               .in_place = true,
                               .packed = true,
                               .kept = true,
                               .least_memory = true});
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    uint64_t taken = lh_kept_taken_bytes(rig.engine);
    LH_CHECK(taken > 0 && taken <= rig.engine->opts.in_place.kept_bytes);
    rig_in_place_spoil(&rig); /* the file must not be read any more */
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_abort(&rig) >= 0);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_flush(&rig, true) == 0);
    LH_CHECK(lh_kept_taken_bytes(rig.engine) == taken);
    rig_unmake(&rig);
}

static void test_kept_short(void)
{
    struct rig rig;
    lh_test_name("packed bytes for which there is no room are read at each load");
    rig_make(&rig, "kept-short",
             (struct rig_opts){.commit_every = 1,
                               .in_place = true,
                               .packed = true,
                               .kept = true,
                               .kept_short = true,
                               .least_memory = true});
    const struct lh_unit *unit = &rig.engine->units[2];
    for (int j = 0; j < 2 * STEP_COUNT; j++)
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_flush(&rig, true) == 0);
    LH_CHECK(atomic_load(&unit->shared.load_count) > 4 && !unit->parts->in_place.kept);
    LH_CHECK(rig.engine->in_place->kept.taken_bytes == 0);
    rig_unmake(&rig);
}

static void test_short_transfers(void)
{
    struct rig rig;
    lh_test_name("reads that fail, come short or wrong: an error, or every byte");
    for (uint64_t turn = 0; turn < 36; turn++) {
        uint64_t after = turn % 12;
        static const enum lh_io_fault_kind kinds[] = {
            LH_IO_FAULT_KIND_SHORT, LH_IO_FAULT_KIND_ERROR, LH_IO_FAULT_KIND_FLIP};
        for (uint32_t kind = 0; kind < 3; kind++) {
            rig_make(&rig, "in-place-faults",
                     (struct rig_opts){.commit_every = 1,
                                       .in_place = true,
                                       .packed = turn / 12 != 0,
                                       .kept = turn / 12 == 2,
                                       .least_memory = true});
            lh_io_faulty_arm(rig.io,
                             (struct lh_io_fault){.kind = kinds[kind],
                                                  .after = after,
                                                  .request_kinds = LH_IO_FAULT_ON(LH_IO_KIND_READ),
                                                  .bytes = LH_BLOCK_BYTES,
                                                  .bit = 800,
                                                  .code = -EIO});
            int rc = rig_forward(&rig, LH_ENGINE_MODE_EVAL);
            /* No unit here is read in pieces that a short transfer could not repair. */
            LH_CHECK(rc == 0 || kind > 0);
            if (rc < 0)
                LH_CHECK(rc == (kind == 1 ? -EIO : -EILSEQ));
            rig_unmake(&rig);
        }
    }
}

static void test_changed(void)
{
    struct rig rig;
    struct lh_error err = {0};
    lh_test_name("a file that was changed is found by its checksum, and named");
    rig_make(&rig, "in-place-changed", (struct rig_opts){.commit_every = 1, .in_place = true});
    rig_in_place_spoil(&rig);
    LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == -EILSEQ);
    LH_CHECK(lh_engine_error(rig.engine, &err) == -EILSEQ);
    LH_CHECK(strstr(err.message, "in-place-changed-in-place-1") && strstr(err.message, "unit 2"));
    LH_CHECK(strstr(err.message, "changed since"));
    rig_unmake(&rig);

    lh_test_name("a file that was cut is an error, not zeros");
    rig_make(&rig, "in-place-cut", (struct rig_opts){.commit_every = 1, .in_place = true});
    rig_in_place_cut(&rig);
    LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == -ENODATA);
    rig_unmake(&rig);
}

static void test_first_reads(bool packed)
{
    struct rig rig;
    struct lh_error err = {0};
    const struct rig_opts opts = {.commit_every = 1, .in_place = true, .packed = packed};
    lh_test_name("a first read records checksums, and later ones are compared (%d)", packed);
    rig_make(&rig, "in-place-first", opts);
    uint32_t count = rig_engine_opts(&rig).in_place.units[0].checksum_count;
    rig_in_place_forget(&rig, false);
    LH_CHECK(rig_in_place_known(&rig) == 0);
    LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == 0);
    LH_CHECK(count > 1 && rig_in_place_known(&rig) == count);
    rig_unmake(&rig);

    lh_test_name("nothing is recorded of a file that was written to before (%d)", packed);
    rig_make(&rig, "in-place-stale", opts);
    rig_in_place_forget(&rig, true);
    LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == -EILSEQ);
    LH_CHECK(lh_engine_error(rig.engine, &err) == -EILSEQ && strstr(err.message, "changed since"));
    LH_CHECK(rig_in_place_known(&rig) == 0);
    rig_unmake(&rig);
}

static void test_refusals(bool packed)
{
    struct rig rig;
    struct lh_engine *engine = NULL;
    struct lh_error err = {0};
    lh_test_name("descriptions that cannot be read in place are refused at creation");
    rig_make(&rig, "in-place-bad",
             (struct rig_opts){.commit_every = 1, .in_place = true, .packed = packed});
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_engine_opts opts = rig_engine_opts(&rig);
    for (uint32_t turn = 0; rig_in_place_bad(&rig, turn, &opts); turn++) {
        lh_test_name("a description that cannot be read in place is refused (%d, %u)", packed,
                     turn);
        LH_CHECK(lh_engine_create(&opts, &alloc, &engine, &err) == -EINVAL && !engine);
        LH_CHECK(alloc.live_count == 0 && strlen(err.message) > 0);
        opts = rig_engine_opts(&rig);
    }
    rig_unmake(&rig);
}

static void test_stopped(void)
{
    struct rig rig;
    lh_test_name("an engine that is stopped while a unit is decoded waits for the job");
    for (uint32_t turn = 0; turn < 40; turn++) {
        rig_make(&rig, "packed-stop",
                 (struct rig_opts){.commit_every = 1,
                                   .in_place = true,
                                   .packed = true,
                                   .kept = turn >= 20,
                                   .in_place_large = true});
        LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
        /* The time until the stop differs from turn to turn. */
        int rc = lh_engine_acquire(rig.engine, 2);
        if (rc == 0 && turn > 0)
            rc = lh_engine_acquire_wait(rig.engine, 2, (int)turn % 4);
        LH_CHECK(rc >= 0);
        rig_unmake(&rig);
    }
}

static void fail(struct rig *rig)
{
    struct lh_error err = {0};
    lh_error_set(&err, -EIO, "a disk failed");
    lh_core_fail(rig->engine, &err);
}

static void test_in_flight(bool fails)
{
    struct rig rig;
    lh_test_name("a unit is lent after its last round of decoding, and never if the engine failed");
    rig_make(&rig, "packed-jobs",
             (struct rig_opts){.commit_every = 1,
                               .in_place = true,
                               .packed = true,
                               .in_place_large = true,
                               .skip_verify = true, /* so that the only jobs are those of rounds */
                               .manual = true});
    const struct lh_unit *unit = &rig.engine->units[2];
    uint64_t decoded = 0;
    uint32_t round_count = 0;
    rig.holds.jobs = true;
    LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
    LH_CHECK(lh_engine_acquire(rig.engine, 2) == 0);
    rig_settle(&rig);
    while (rig.engine->jobs_in_flight > 0) {
        LH_CHECK(unit->state == LH_UNIT_STATE_LOADING && unit->parts->in_place.decoded >= decoded);
        LH_CHECK(lh_engine_acquire_wait(rig.engine, 2, 0) == 0);
        round_count += unit->parts->in_place.decoded > decoded;
        decoded = unit->parts->in_place.decoded;
        if (fails && round_count == 2)
            fail(&rig);
        rig.holds.jobs = false;
        rig_poll(&rig);
        rig.holds.jobs = true;
    }
    rig.holds.jobs = false;
    rig_settle(&rig);
    LH_CHECK(fails ? round_count == 2 : round_count >= 4);
    LH_CHECK(unit->state == (fails ? LH_UNIT_STATE_LOADING : LH_UNIT_STATE_READY));
    LH_CHECK(lh_engine_acquire_wait(rig.engine, 2, 0) == (fails ? -EIO : 1));
    if (!fails) {
        lh_engine_unpin(rig.engine, 2);
        LH_CHECK(rig_acquire(&rig, 2) == 0); /* it compares the bytes */
        lh_engine_unpin(rig.engine, 2);
    }
    rig_unmake(&rig);
}

int main(void)
{
    test_first_reads(false);
    test_first_reads(true);
    test_refusals(false);
    test_refusals(true);
    test_in_flight(false);
    test_in_flight(true);
    test_changed();
    test_bytes();
    test_kept_once(false);
    test_kept_once(true);
    test_kept_short();
    test_kept_through_abort();
    test_short_transfers();
    test_stopped();
    return 0;
}
