/*
 * Test reads of main memory while an accelerator computes: they see the values of the last step,
 * copy nothing to or from the accelerator, and change nothing that the next step does.
 */
#include <errno.h>

#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_reference.h"
#include "rig_team.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define DEVICE_BYTES (UINT64_C(3) << 20)
#define STEP_COUNT 4
#define COPY_IN LH_ENGINE_LINK_COPY_IN
#define COPY_OUT LH_ENGINE_LINK_COPY_OUT

static struct rig_opts opts_of(enum lh_engine_schedule schedule, bool is_manual)
{
    return (struct rig_opts){
        .device = "emu",
        .device_bytes = DEVICE_BYTES,
        .large = true,
        .least_memory = true,
        .in_memory = true,
        .schedule = schedule,
        .manual = is_manual,
        .commit_every = 1,
    };
}

static int read_wait(struct rig *rig)
{
    int rc = 0;
    rig_wait_begin(rig);
    do {
        rc = lh_reading_wait(rig->engine, rig_slice_ms(rig));
    } while (rig_waits(rig, rc));
    return rc;
}

static bool is_right(struct rig *rig, uint32_t unit)
{
    const uint8_t *expected = rig_array_at(rig, rig->state, unit, RIG_ARRAY_PARAM);
    const uint8_t *found = lh_reading_address(rig->engine, unit);
    return memcmp(found, expected, rig->units[unit].bytes) == 0;
}

static void read_check(struct rig *rig, uint32_t unit)
{
    lh_reading_begin(rig->engine, unit);
    LH_CHECK(read_wait(rig) == 1);
    LH_CHECK(is_right(rig, unit));
    lh_reading_end(rig->engine, unit);
}

/* The bytes of each step over the accelerator's links. */
struct copied {
    uint64_t in[STEP_COUNT];
    uint64_t out[STEP_COUNT];
};

static struct copied train(struct rig_opts opts, bool reads)
{
    struct copied copied;
    struct rig rig;
    rig_make(&rig, "reading", opts);
    for (uint32_t i = 0; i < STEP_COUNT; i++) {
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        for (uint32_t unit = RIG_UNIT_COUNT; reads && unit-- > 0;)
            read_check(&rig, (unit + i) % RIG_UNIT_COUNT);
        struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
        copied.in[i] = stats.bytes[COPY_IN];
        copied.out[i] = stats.bytes[COPY_OUT];
    }
    for (uint32_t unit = 0; reads && unit < RIG_UNIT_COUNT; unit++)
        read_check(&rig, unit);
    rig_finish(&rig);
    return copied;
}

static void test_values(struct rig_opts opts, const char *name)
{
    lh_test_name("%s: after each step, and before its updates are made, reads see its values%s",
                 name, opts.manual ? ", and nothing is copied for them" : "");
    struct copied with = train(opts, true);
    if (!opts.manual)
        return; /* what a step copies ahead depends on time */
    struct copied without = train(opts, false);
    LH_CHECK(memcmp(&with, &without, sizeof(with)) == 0);
}

static void test_pending(void)
{
    struct rig rig;
    lh_test_name("a read waits for its unit's update, and for no other one");
    rig_make(&rig, "reading-pending", opts_of(LH_ENGINE_SCHEDULE_DEFERRED, true));
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_settle(&rig);
    rig.holds.jobs = true;
    LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
    lh_reading_begin(rig.engine, 1);
    rig_settle(&rig);
    LH_CHECK(lh_reading_wait(rig.engine, 0) == 0);
    rig.holds.jobs = false;
    LH_CHECK(read_wait(&rig) == 1 && is_right(&rig, 1));
    lh_reading_end(rig.engine, 1);
    rig_settle(&rig);
    LH_CHECK(lh_engine_over_wait(rig.engine, 0) == 0);
    rig_over_as_planned(&rig);
    rig_finish(&rig);
}

static void test_given_up(void)
{
    struct rig rig;
    lh_test_name("a read may be given up, and the next one does not take its unit for its own");
    rig_make(&rig, "reading-given-up", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED, true));
    rig.holds.requests = LH_IO_FAULT_ON(LH_IO_KIND_READ);
    lh_reading_begin(rig.engine, 5);
    rig_settle(&rig);
    LH_CHECK(lh_reading_wait(rig.engine, 0) == 0);
    lh_reading_end(rig.engine, 5);
    rig.holds.requests = 0;
    rig_settle(&rig);
    lh_reading_begin(rig.engine, 5);
    rig_settle(&rig);
    lh_reading_end(rig.engine, 5);
    lh_reading_begin(rig.engine, 3);
    LH_CHECK(lh_reading_wait(rig.engine, 0) == 0);
    LH_CHECK(read_wait(&rig) == 1 && is_right(&rig, 3));
    lh_reading_end(rig.engine, 3);
    rig_settle(&rig);
    LH_CHECK(!rig.engine->reading->unit);
    rig_unmake(&rig);
}

static void test_lent(void)
{
    struct rig rig;
    struct rig_opts opts = opts_of(LH_ENGINE_SCHEDULE_DEFERRED, true);
    lh_test_name("while it is read, a unit stays where it is, whatever else is used");
    opts.spare_bytes = 1 << 20;
    rig_make(&rig, "reading-lent", opts);
    lh_reading_begin(rig.engine, 3);
    LH_CHECK(read_wait(&rig) == 1);
    const uint8_t *address = lh_reading_address(rig.engine, 3);
    for (int i = 0; i < 3; i++) {
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == 0);
        LH_CHECK(lh_reading_address(rig.engine, 3) == address && is_right(&rig, 3));
    }
    lh_reading_end(rig.engine, 3);
    lh_test_name("a unit that is read is not updated before the end of the read");
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    lh_reading_begin(rig.engine, 3);
    LH_CHECK(read_wait(&rig) == 1 && is_right(&rig, 3));
    address = lh_reading_address(rig.engine, 3);
    LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(lh_engine_over_wait(rig.engine, 0) == 0);
    rig_settle(&rig);
    LH_CHECK(lh_engine_over_wait(rig.engine, 0) == 0);
    const uint8_t *before = rig_array_at(&rig, rig.snapshots[0], 3, RIG_ARRAY_PARAM);
    LH_CHECK(lh_reading_address(rig.engine, 3) == address);
    LH_CHECK(memcmp(address, before, rig.units[3].bytes) == 0);
    lh_reading_end(rig.engine, 3);
    rig_over_as_planned(&rig);
    read_check(&rig, 3);
    rig_finish(&rig);
}

static void test_failed(void)
{
    struct rig rig;
    struct lh_error err = {0};
    lh_test_name("a failed engine lends nothing for a read");
    rig_make(&rig, "reading-failed", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED, true));
    lh_reading_begin(rig.engine, 3);
    rig_settle(&rig);
    lh_error_set(&err, -EIO, "the test fails the engine");
    lh_core_fail(rig.engine, &err);
    LH_CHECK(lh_reading_wait(rig.engine, 0) == -EIO);
    lh_reading_end(rig.engine, 3);
    rig_unmake(&rig);
}

/* An owner without an accelerator, or with one, and a mate of the other kind. */
static void team_make(struct rig *owner, struct rig *mate, bool is_owners)
{
    struct rig_opts opts = opts_of(LH_ENGINE_SCHEDULE_SERIAL, false);
    opts.plain_gradients = true;
    opts.team_mates = 1;
    opts.device = is_owners ? "emu" : NULL;
    rig_make(owner, "reading-owner", opts);
    opts.device = is_owners ? NULL : "emu";
    opts.least_memory = is_owners;
    opts.team_mates = 0;
    opts.team_of = owner;
    opts.team_mate = 1;
    opts.commit_every = LH_ENGINE_COMMIT_NEVER;
    rig_make(mate, "reading-mate", opts);
}

static void team_unmake(struct rig *owner, struct rig *mate)
{
    lh_engine_stop(mate->engine);
    lh_engine_stop(owner->engine);
    rig_unmake(mate);
    rig_unmake(owner);
}

static void test_mate(void)
{
    struct rig owner;
    struct rig mate;
    lh_test_name("a mate with an accelerator reads every unit in the owner's memory, which does not"
                 " hold all, and copies nothing");
    team_make(&owner, &mate, false);
    for (uint32_t i = 0; i < 30; i++)
        read_check(&mate, i * 7 % RIG_UNIT_COUNT);
    LH_CHECK(rig_flush(&mate, false) == 0);
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        LH_CHECK(atomic_load(&mate.engine->units[i].copy.copy_count) == 0);
    lh_test_name("a mate reads although the owner is short of room");
    lh_team_room_ask(owner.team, true);
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        read_check(&mate, i);
    team_unmake(&owner, &mate);
}

static void test_no_room(void)
{
    struct rig owner;
    struct rig mate;
    struct lh_error err = {0};
    lh_test_name("mates give back what they do not use, for units that the owner reads");
    team_make(&owner, &mate, true);
    LH_CHECK(rig_forward(&mate, LH_ENGINE_MODE_EVAL) == 0);
    for (uint32_t i = 0; i < 12; i++)
        read_check(&owner, i * 5 % RIG_UNIT_COUNT);
    lh_test_name("a read that has no room, and that nothing can end, names its unit");
    for (uint32_t i = 0; i < 5; i++)
        LH_CHECK(rig_acquire(&mate, i) == 0);
    lh_engine_stop(mate.engine);
    lh_team_waits_set(mate.team, true);
    lh_reading_begin(owner.engine, 5);
    LH_CHECK(read_wait(&owner) == -ENOSPC);
    LH_CHECK(lh_engine_error(owner.engine, &err) == -ENOSPC);
    LH_CHECK(strstr(err.message, "unit 5, which is read in main memory") != NULL);
    lh_reading_end(owner.engine, 5);
    for (uint32_t i = 0; i < 5; i++)
        lh_engine_unpin(mate.engine, i);
    team_unmake(&owner, &mate);
}

int main(void)
{
    static const char *const names[] = {"optimized", "naive", "deferred", "serial", "auto"};
    static const enum lh_engine_schedule schedules[] = {
        LH_ENGINE_SCHEDULE_OPTIMIZED, LH_ENGINE_SCHEDULE_NAIVE, LH_ENGINE_SCHEDULE_DEFERRED,
        LH_ENGINE_SCHEDULE_SERIAL, LH_ENGINE_SCHEDULE_AUTO};
    for (size_t i = 0; i < LH_COUNT_OF(schedules); i++) {
        test_values(opts_of(schedules[i], true), names[i]);
        test_values(opts_of(schedules[i], false), names[i]);
    }
    test_pending();
    test_given_up();
    test_lent();
    test_failed();
    test_mate();
    test_no_room();
    return 0;
}
