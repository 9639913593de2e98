/*
 * Test the engine with an accelerator, emulated and CUDA's on a driver made of threads: computation
 * is enqueued and runs late, slots are few, and every read has to see the bytes of its own step.
 * Kind "unified" is the latter, reading units in main memory.
 */
#include "compute/zo_launch.h"
#include "dev_fixture.h"
#include "rig_device.h"
#include "rig_wait.h"

#define ALWAYS_BYTES UINT64_C(8192)
#define LARGEST_BYTES UINT64_C(16384)
/* Room for the unit that stays and two others: each slot is reused many times a step. */
#define DEVICE_BYTES (ALWAYS_BYTES + 2 * LARGEST_BYTES)

static void *gate_open_late(void *gate)
{
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    gate_open(gate);
    return NULL;
}

static const enum lh_engine_schedule schedules[] = {
    LH_ENGINE_SCHEDULE_OPTIMIZED, LH_ENGINE_SCHEDULE_SERIAL, LH_ENGINE_SCHEDULE_NAIVE,
    LH_ENGINE_SCHEDULE_DEFERRED};
static const char *const schedule_names[] = {"optimized", "serial", "naive", "deferred"};

static struct rig_opts opts_of(const char *kind, enum lh_engine_schedule schedule)
{
    bool is_unified = strcmp(kind, "unified") == 0;
    return (struct rig_opts){
        .device = is_unified ? "fake" : kind,
        .device_bytes = DEVICE_BYTES,
        .units_in_memory = is_unified,
        .schedule = schedule,
        .least_memory = true,
        .commit_every = 1,
        .in_memory = true,
    };
}

static void check_counters(struct rig *rig)
{
    struct lh_engine_step_stats stats;
    LH_CHECK(rig_flush(rig, false) == 0 && lh_engine_stats(rig->engine, &stats));
    for (int i = 0; i < LH_ENGINE_LINK_COUNT; i++)
        LH_CHECK(stats.bytes[i] == stats.planned_bytes[i]);
    LH_CHECK(rig->opts.large ||
             (stats.bytes[LH_ENGINE_LINK_COPY_IN] > 0) == !rig->opts.units_in_memory);
    LH_CHECK(!rig->opts.units_in_memory || stats.copy_busy_ns[LH_DEV_DIRECTION_IN] == 0);
    LH_CHECK(stats.bytes[LH_ENGINE_LINK_COPY_OUT] > 0);
}

static void test_equal(struct rig_opts opts, int step_count)
{
    static const unsigned gradients[] = {RIG_GRADIENTS_ALL, 0xad, 0x01, RIG_GRADIENTS_ALL, 0x6e};
    struct rig rig;
    lh_test_name("%s, %s, %d of %d: what is enqueued sees rule_ref's bits, and the counters the "
                 "plan's",
                 opts.units_in_memory ? "unified" : opts.device, schedule_names[opts.schedule],
                 (int)opts.commit_every, (int)opts.spare_bytes);
    rig_make(&rig, "device", opts);
    for (int i = 0; i < step_count; i++) {
        LH_CHECK(rig_step(&rig, gradients[i % 5]) == 0);
        if (i % 3 == 1)
            LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == 0);
        if (i % 3 == 2)
            check_counters(&rig);
    }
    rig_device_check(&rig);
    rig_finish(&rig);
}

static void test_abort(const char *kind)
{
    struct rig rig;
    lh_test_name("%s: an aborted step leaves no trace, with copies on their way", kind);
    rig_make(&rig, "device-abort", opts_of(kind, LH_ENGINE_SCHEDULE_OPTIMIZED));
    for (int i = 0; i < 6; i++) {
        LH_CHECK(rig_forward_backward(&rig, i % 3 == 0 ? RIG_GRADIENTS_ALL : 0x20) == 0);
        if (i % 3 == 2)
            LH_CHECK(rig_flush(&rig, false) == 0);
        LH_CHECK(rig_abort(&rig) == 0);
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    }
    rig_finish(&rig);
}

static void test_stop(const char *kind)
{
    struct rig rig;
    lh_test_name("%s: stopped at any time it is at a committed step, and what was read is right",
                 kind);
    rig_make(&rig, "device-stop", opts_of(kind, LH_ENGINE_SCHEDULE_DEFERRED));
    for (int i = 0; i < 6; i++) {
        for (int j = 0; j <= i % 3; j++)
            LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        if (i % 2 == 1)
            LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_shut(&rig);
        rig_reopen(&rig);
    }
    rig_unmake(&rig);
}

static void test_errors(const char *kind)
{
    lh_test_name("%s: a disk that fails with copies on their way ends every wait", kind);
    for (uint64_t after = 0; after < 60; after += 4) {
        struct rig rig;
        struct lh_io_fault fault = {.kind = LH_IO_FAULT_KIND_ERROR, .after = after, .code = -EIO};
        rig_make(&rig, "device-errors", opts_of(kind, LH_ENGINE_SCHEDULE_OPTIMIZED));
        lh_io_faulty_arm(rig.io, fault);
        int rc = 0;
        for (int i = 0; i < 2 && rc == 0; i++)
            rc = rig_step(&rig, RIG_GRADIENTS_ALL);
        LH_CHECK(rc == 0 || rc == -EIO);
        LH_CHECK(rc == 0 || lh_engine_flush(rig.engine, true, 1000) == -EIO);
        rig_unmake(&rig);
    }
}

static void test_unified_update(void)
{
    struct rig rig;
    struct gate gate = GATE_INIT;
    struct rig_opts opts = opts_of("unified", LH_ENGINE_SCHEDULE_DEFERRED);
    lh_test_name("unified: an update waits for the last reader that is enqueued, and then runs");
    opts.least_memory = false;
    rig_make(&rig, "device-unified", opts);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_device_drain(&rig);
    machine_hold(rig_device_machine(&rig), &gate);
    LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == 0);
    LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(lh_engine_flush(rig.engine, false, 300) == 0);
    gate_open(&gate);
    LH_CHECK(rig_flush(&rig, false) == 0);
    rig_device_check(&rig);
    rig_finish(&rig);
}

static void test_unified_invalidated(void)
{
    struct rig rig;
    struct gate gate = GATE_INIT;
    lh_test_name("unified: a unit whose extents change is dropped when its last reader is over");
    rig_make(&rig, "device-unified", opts_of("unified", LH_ENGINE_SCHEDULE_OPTIMIZED));
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_flush(&rig, true) == 0);
    machine_hold(rig_device_machine(&rig), &gate);
    LH_CHECK(rig_acquire(&rig, 1) == 0);
    lh_engine_unpin(rig.engine, 1);
    rig_pause(&rig);
    pthread_t opener;
    LH_CHECK(pthread_create(&opener, NULL, gate_open_late, &gate) == 0);
    lh_engine_invalidate(rig.engine, 1);
    LH_CHECK(gate.is_open);
    lh_engine_resume(rig.engine);
    LH_CHECK(pthread_join(opener, NULL) == 0);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_finish(&rig);
}

static void test_unified_refused(void)
{
    struct rig rig;
    lh_test_name("a device that cannot read main memory in order is refused");
    rig_make(&rig, "device-unified", opts_of("unified", LH_ENGINE_SCHEDULE_OPTIMIZED));
    for (int i = 0; i < 3; i++) {
        struct lh_dev_ops ops = *rig_device_machine(&rig)->dev->ops;
        struct lh_dev dev = {.ops = &ops};
        struct lh_engine *engine = NULL;
        struct lh_error err = {0};
        struct lh_engine_opts opts = rig_engine_opts(&rig);
        ops.is_ordered = i != 0;
        ops.has_passed = i == 1 ? NULL : ops.has_passed;
        ops.synchronize = i == 2 ? NULL : ops.synchronize;
        opts.dev = &dev;
        LH_CHECK(lh_engine_create(&opts, &rig.alloc, &engine, &err) == -EINVAL && !engine);
        LH_CHECK(strstr(err.message, "cannot read units in main memory"));
    }
    rig_unmake(&rig);
}

/* What a test that changes units knows of one unit: its bytes, as numbers. */
struct moved {
    float *base;
    float *now;
    float *host; /* the bytes that were last copied back to main memory */
    struct lh_engine_bytes seen;
    uint32_t position; /* the number of ops in `now`; host_position: in `host` */
    uint32_t host_position;
};

static void moved_begin(struct rig *rig, struct moved *moved, uint32_t unit)
{
    uint64_t bytes = rig->units[unit].bytes;
    float **copies[] = {&moved->base, &moved->now, &moved->host};
    rig_device_drain(rig);
    for (size_t i = 0; i < LH_COUNT_OF(copies); i++) {
        *copies[i] = malloc(bytes);
        LH_CHECK(*copies[i]);
        memcpy(*copies[i], lh_engine_address(rig->engine, unit), bytes);
    }
    moved->seen = lh_engine_bytes(rig->engine, unit);
}

/* Execute the next op on the accelerator and here. No thread waits. */
static void moved_lead(struct rig *rig, struct moved *moved, uint32_t unit,
                       struct lh_dev_kernel *kernel)
{
    struct machine *machine = rig_device_machine(rig);
    uint64_t count = rig->units[unit].bytes / sizeof(float);
    float *values = (float *)(void *)lh_engine_address(rig->engine, unit);
    struct lh_zo_op op = {.kind = LH_ZO_OP_PERTURB,
                          .stream = {.seed = 3, .param = unit, .step = moved->position++},
                          .scale = 0.25f};
    lh_zo_apply(moved->now, moved->now, 0, count, &op, 1);
    if (kernel)
        LH_CHECK(lh_zo_launch(machine->dev, kernel, machine->stream, values, 0, count, &op, 1,
                              NULL) == 0);
    else
        lh_zo_apply(values, values, 0, count, &op, 1);
}

static void moved_visit(struct rig *rig, struct moved *moved, uint32_t unit, bool is_kept,
                        struct lh_dev_kernel *kernel)
{
    uint64_t bytes = rig->units[unit].bytes;
    int rc = lh_engine_acquire(rig->engine, unit);
    while (rc == 0)
        rc = lh_engine_acquire_wait(rig->engine, unit, 1000);
    LH_CHECK(rc == 1);
    if (!moved->base)
        moved_begin(rig, moved, unit);
    struct lh_engine_bytes now = lh_engine_bytes(rig->engine, unit);
    if (now.out_count != moved->seen.out_count) {
        memcpy(moved->host, moved->now, bytes);
        moved->host_position = moved->position;
    }
    if (now.make_count != moved->seen.make_count) {
        uint32_t before = moved->position;
        memcpy(moved->now, now.is_from_write_back ? moved->host : moved->base, bytes);
        moved->position = now.is_from_write_back ? moved->host_position : 0;
        LH_CHECK(!is_kept || moved->position == before);
    }
    moved->seen = now;
    rig_device_read(rig, unit, moved->now);
    moved_lead(rig, moved, unit, kernel);
    lh_engine_moved(rig->engine, unit);
    lh_engine_unpin(rig->engine, unit);
}

static void test_moved(const char *kind, uint32_t policy, bool least)
{
    struct rig rig;
    struct moved moved[RIG_UNIT_COUNT] = {0};
    struct lh_dev_kernel *kernel = NULL;
    struct rig_opts opts = opts_of(kind, LH_ENGINE_SCHEDULE_OPTIMIZED);
    lh_test_name(
        "%s, policy %d, %s: a unit that was changed comes back as it was left, or its base", kind,
        (int)policy, least ? "least memory" : "all in memory");
    opts.least_memory = least;
    rig_make(&rig, "device-moved", opts);
    struct lh_dev *dev = rig_device_machine(&rig)->dev;
    if (strcmp(kind, "emu") != 0)
        LH_CHECK(dev->ops->kernel_load(dev, fake_cuda_image, LH_ZO_KERNEL_NAME, &kernel, NULL) ==
                 0);
    lh_device_policy_set(rig.engine, policy, UINT64_C(1) << 30);
    for (int round = 0; round < 12; round++) {
        LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
        for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
            moved_visit(&rig, &moved[i], i, !least && round > 0, kernel);
        if (round % 4 == 3)
            LH_CHECK(rig_flush(&rig, false) == 0);
    }
    rig_device_check(&rig);
    uint32_t out_count = 0;
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        out_count += moved[i].seen.out_count;
        free(moved[i].base);
        free(moved[i].now);
        free(moved[i].host);
    }
    LH_CHECK(least || out_count > RIG_UNIT_COUNT);
    if (kernel)
        dev->ops->kernel_unload(dev, kernel);
    rig_unmake(&rig);
}

/* Pin units until one is refused. Returns that unit, with the others unpinned. */
static uint32_t refused_unit(struct rig *rig)
{
    uint32_t unit = 0;
    LH_CHECK(lh_engine_begin(rig->engine, LH_ENGINE_MODE_EVAL) == 0);
    while (unit < RIG_UNIT_COUNT && rig_acquire(rig, unit) == 0)
        unit++;
    for (uint32_t i = 0; i < unit; i++)
        lh_engine_unpin(rig->engine, i);
    return unit;
}

static void test_no_room(const char *kind, const char *setting)
{
    struct rig rig;
    char expected[96];
    struct lh_error err = {0};
    lh_test_name("without room, %s: the refusal names the unit that is awaited and %s, and the "
                 "engine continues",
                 kind ? kind : "main memory", setting);
    struct rig_opts opts = opts_of(kind ? kind : "emu", LH_ENGINE_SCHEDULE_OPTIMIZED);
    opts.device = kind;
    rig_make(&rig, "no-room", opts);
    uint32_t unit = refused_unit(&rig);
    LH_CHECK(unit > 1 && unit < RIG_UNIT_COUNT);
    LH_CHECK(lh_engine_error(rig.engine, &err) == 0);
    lh_engine_refusal(rig.engine, &err);
    snprintf(expected, sizeof(expected), "unit %u needs %" PRIu64 " bytes in one piece, and %u",
             unit, rig.units[unit].place_bytes, unit);
    LH_CHECK(err.code == -ENOSPC && strstr(err.message, expected) == err.message);
    LH_CHECK(strstr(err.message, setting));
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    if (rig.device)
        rig_device_check(&rig);
    rig_finish(&rig);
}

int main(void)
{
    test_no_room(NULL, "raise host_bytes, of which");
    test_no_room("emu", "raise debug.device_param_bytes (with");
    test_no_room("fake", "raise debug.device_param_bytes (with");
    for (uint32_t policy = 0; policy <= (LH_ENGINE_DEVICE_NO_OVERLAP | LH_ENGINE_DEVICE_NO_REUSE);
         policy++) {
        test_moved("emu", policy, false);
        test_moved("emu", policy, true);
        if (policy & LH_ENGINE_DEVICE_NO_REUSE)
            continue; /* only the emulated device has this policy */
        test_moved("fake", policy, false);
        test_moved("fake", policy, true);
        test_moved("staged", policy, true);
    }
    test_unified_update();
    test_unified_invalidated();
    test_unified_refused();
    static const char *const kinds[] = {"emu", "fake", "staged", "unified"};
    int step_count = lh_test_is_fast() ? 7 : 20;
    for (size_t i = 0; i < LH_COUNT_OF(kinds); i++) {
        for (size_t j = 0; j < LH_COUNT_OF(schedules); j++) {
            struct rig_opts opts = opts_of(kinds[i], schedules[j]);
            test_equal(opts, step_count);
            opts.spare_bytes = UINT64_C(100000);
            opts.commit_every = 2;
            test_equal(opts, step_count);
        }
        struct rig_opts large = opts_of(kinds[i], LH_ENGINE_SCHEDULE_OPTIMIZED);
        large.large = true; /* a gradient is copied in two pieces */
        large.device_bytes = UINT64_C(6) << 20;
        test_equal(large, step_count / 2);
        struct rig_opts beside = opts_of(kinds[i], LH_ENGINE_SCHEDULE_OPTIMIZED);
        beside.beside_bytes = 2 * LH_BLOCK_BYTES;
        beside.device_bytes += 4 * beside.beside_bytes;
        test_equal(beside, step_count / 2);
        test_abort(kinds[i]);
        test_stop(kinds[i]);
        test_errors(kinds[i]);
    }
    return 0;
}
