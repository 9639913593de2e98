/* Test saved tensors that are offloaded and fetched while the engine trains. */
#include <unistd.h>

#include "dev_fixture.h"
#include "rig_device.h"
#include "rig_saved.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define ITEM_COUNT 24
#define ITEM_BYTES_MAX 300000
#define SLICE_MS 50

struct saved_test {
    struct rig rig;
    uint64_t seed;
    uint64_t bytes[ITEM_COUNT];
    uint8_t *values[ITEM_COUNT];
    uint8_t *sources[ITEM_COUNT]; /* the addresses where computation happens */
    uint8_t *targets[ITEM_COUNT];
    uint32_t items[ITEM_COUNT];
};

static uint64_t below(struct saved_test *test, uint64_t end)
{
    return lh_test_random(&test->seed) % end;
}

static struct machine *machine_of(struct saved_test *test)
{
    return test->rig.device ? rig_device_machine(&test->rig) : NULL;
}

static void *allocate(struct saved_test *test, uint64_t bytes)
{
    struct machine *machine = machine_of(test);
    void *memory = machine ? machine_allocate(machine, bytes) : malloc(bytes);
    LH_CHECK(memory);
    return memory;
}

static void release(struct saved_test *test, void *memory)
{
    struct machine *machine = machine_of(test);
    if (machine)
        machine_free(machine, memory);
    else
        free(memory);
}

/* Computation writes bytes to target; the stream does this later. */
static void compute(struct saved_test *test, void *target, const void *source, uint64_t bytes)
{
    struct machine *machine = machine_of(test);
    if (machine)
        machine_compute(machine, target, source, bytes);
    else
        memcpy(target, source, bytes);
}

static void test_open(struct saved_test *test, const char *kind, uint64_t memory_bytes,
                      uint64_t transit_bytes, uint64_t ssd_bytes)
{
    struct rig_opts opts = {
        .commit_every = 1,
        .in_memory = true,
        .device = kind,
        .device_bytes = UINT64_C(1) << 20,
        .saved_bytes = memory_bytes,
        .saved_transit_bytes = transit_bytes,
        .saved_ssd_bytes = ssd_bytes,
        .saved_item_max = ITEM_COUNT,
    };
    *test = (struct saved_test){.seed = 5};
    rig_make(&test->rig, "saved", opts);
    for (uint32_t i = 0; i < ITEM_COUNT; i++) {
        test->bytes[i] = i % 7 == 0 ? LH_MIB + 5000 : 1 + below(test, ITEM_BYTES_MAX);
        test->values[i] = allocate(test, test->bytes[i]);
        test->sources[i] = allocate(test, test->bytes[i]);
        test->targets[i] = allocate(test, test->bytes[i]);
        test->items[i] = LH_SAVED_NONE;
    }
}

static void test_shut(struct saved_test *test)
{
    rig_device_drain(&test->rig);
    for (uint32_t i = 0; i < ITEM_COUNT; i++) {
        release(test, test->values[i]);
        release(test, test->sources[i]);
        release(test, test->targets[i]);
    }
    rig_unmake(&test->rig);
}

static void values_make(struct saved_test *test, uint32_t i)
{
    uint64_t word = lh_test_random(&test->seed);
    for (uint64_t j = 0; j < test->bytes[i]; j += sizeof(word)) {
        word = word * 3 + 1;
        memcpy(test->values[i] + j, &word, lh_min_u64(sizeof(word), test->bytes[i] - j));
    }
}

static void put(struct saved_test *test, uint32_t i)
{
    enum lh_saved_tier tier = below(test, 3) == 0 ? LH_SAVED_TIER_MEMORY : LH_SAVED_TIER_SSD;
    rig_device_drain(&test->rig);
    values_make(test, i);
    compute(test, test->sources[i], test->values[i], test->bytes[i]);
    LH_CHECK(lh_saved_put(test->rig.engine, test->sources[i], test->bytes[i], tier,
                          &test->items[i]) == 0);
}

/* Returns 1, or the engine's error. */
static int taken_wait(struct saved_test *test)
{
    int rc = 0;
    while (rc == 0)
        rc = lh_saved_room_wait(test->rig.engine, 0, SLICE_MS);
    return rc;
}

static int back_wait(struct saved_test *test, uint32_t i)
{
    int rc = 0;
    while (rc == 0)
        rc = lh_saved_wait(test->rig.engine, test->items[i], SLICE_MS);
    return rc;
}

static void check(struct saved_test *test, uint32_t i)
{
    const uint8_t *found = test->targets[i];
    if (!machine_of(test)) {
        found = lh_saved_address(test->rig.engine, test->items[i]);
    } else {
        /* What computation reads from here on, whenever the stream gets there. */
        compute(test, test->sources[i], test->targets[i], test->bytes[i]);
        rig_device_drain(&test->rig);
        found = test->sources[i];
    }
    LH_CHECK(memcmp(found, test->values[i], test->bytes[i]) == 0);
}

static void fetch(struct saved_test *test, uint32_t i)
{
    memset(test->targets[i], 0x77, test->bytes[i]);
    lh_saved_fetch(test->rig.engine, test->items[i], machine_of(test) ? test->targets[i] : NULL);
}

static void all_free_check(struct saved_test *test)
{
    const struct lh_saved_area *area = test->rig.engine->saved;
    LH_CHECK(area->transit.free_bytes == area->transit.total_bytes);
    LH_CHECK(area->staying.free_bytes == area->staying.total_bytes);
    LH_CHECK(area->ssd.free_bytes == area->ssd.total_bytes);
}

static void test_round_trips(const char *kind, uint64_t memory_bytes)
{
    lh_test_name("%s, %" PRIu64
                 " bytes of memory: saved tensors come back bit for bit while a step "
                 "trains, in any order, some dropped before; counters equal the plan; all is freed",
                 kind ? kind : "main memory", memory_bytes);
    static struct saved_test test;
    int round_max = lh_test_is_fast() ? 4 : 12;
    test_open(&test, kind, memory_bytes, lh_min_u64(memory_bytes, 3 * LH_MIB + 40960), 64 * LH_MIB);
    for (int round = 0; round < round_max; round++) {
        LH_CHECK(rig_forward_backward(&test.rig, RIG_GRADIENTS_ALL) == 0);
        for (uint32_t i = 0; i < ITEM_COUNT; i++)
            put(&test, i);
        /* Before the close: what leaves is counted at the step while that is open. */
        LH_CHECK(taken_wait(&test) == 1);
        LH_CHECK(rig_close(&test.rig, RIG_GRADIENTS_ALL) == 0);
        for (uint32_t i = 0; i < ITEM_COUNT; i++)
            /* the place is free, so it may be overwritten */
            memset(test.sources[i], 0x33, test.bytes[i]);
        uint32_t ahead = 1 + (uint32_t)below(&test, 4);
        uint32_t next = ITEM_COUNT;
        for (uint32_t i = ITEM_COUNT; i-- > 0;) {
            while (next > 0 && next + ahead > i + 1) {
                next--;
                if (next % 5 != 4)
                    fetch(&test, next);
            }
            if (i % 5 != 4) {
                LH_CHECK(back_wait(&test, i) == 1);
                check(&test, i);
            }
            lh_saved_drop(test.rig.engine, test.items[i]);
        }
        LH_CHECK(rig_flush(&test.rig, false) == 0);
        all_free_check(&test);
    }
    struct lh_engine_step_stats stats;
    LH_CHECK(lh_engine_stats(test.rig.engine, &stats));
    for (int i = 0; i < LH_ENGINE_LINK_COUNT; i++)
        LH_CHECK(stats.bytes[i] == stats.planned_bytes[i]);
    LH_CHECK(stats.bytes[LH_ENGINE_LINK_SAVED_WRITE] > 0);
    test_shut(&test);
}

static void test_dropped_unread(void)
{
    lh_test_name("asked for and dropped before it is read, or while it waits for room");
    static struct saved_test test;
    int round_max = lh_test_is_fast() ? 10 : 40;
    test_open(&test, NULL, 3 * LH_MIB + 40960, 3 * LH_MIB + 40960, 64 * LH_MIB);
    for (int round = 0; round < round_max; round++) {
        for (uint32_t i = 0; i < ITEM_COUNT; i++)
            put(&test, i);
        LH_CHECK(taken_wait(&test) == 1);
        LH_CHECK(rig_flush(&test.rig, false) == 0);
        uint32_t kept = (uint32_t)below(&test, ITEM_COUNT);
        for (uint32_t i = ITEM_COUNT; i-- > 0;) {
            fetch(&test, i);
            if (i != kept && below(&test, 2) == 0) {
                lh_saved_drop(test.rig.engine, test.items[i]);
                test.items[i] = LH_SAVED_NONE;
            }
        }
        for (uint32_t i = ITEM_COUNT; i-- > 0;)
            if (i != kept && test.items[i] != LH_SAVED_NONE)
                lh_saved_drop(test.rig.engine, test.items[i]);
        LH_CHECK(back_wait(&test, kept) == 1);
        check(&test, kept);
        lh_saved_drop(test.rig.engine, test.items[kept]);
        LH_CHECK(rig_flush(&test.rig, false) == 0);
        all_free_check(&test);
    }
    test_shut(&test);
}

static void test_refusals(void)
{
    lh_test_name("what does not fit is refused, or ends the wait with the numbers");
    static struct saved_test test;
    struct lh_error err = {0};
    uint32_t item = 0;
    test_open(&test, NULL, 2 * LH_MIB, 2 * LH_MIB, LH_MIB);
    LH_CHECK(lh_saved_put(test.rig.engine, test.sources[0], 2 * LH_MIB + 1, LH_SAVED_TIER_SSD,
                          &item) == -E2BIG);
    for (uint32_t i = 0; i < ITEM_COUNT; i++) {
        test.bytes[i] = lh_min_u64(test.bytes[i], 4000);
        put(&test, i);
    }
    LH_CHECK(lh_saved_put(test.rig.engine, test.sources[0], 1, LH_SAVED_TIER_SSD, &item) ==
             -EAGAIN);
    /* SSD has room for one of them. Nothing moves any more when the wait begins. */
    usleep(200000);
    LH_CHECK(lh_saved_room_wait(test.rig.engine, 0, 20000) == -ENOSPC);
    LH_CHECK(lh_engine_error(test.rig.engine, &err) == -ENOSPC);
    LH_CHECK(strstr(err.message, "bytes out: ") && strstr(err.message, " bytes, 0 free, where"));
    test_shut(&test);
}

static void test_wrong_byte(void)
{
    lh_test_name("a byte that changed on SSD is found, and names the saved tensor's file");
    static struct saved_test test;
    struct lh_error err = {0};
    test_open(&test, NULL, 3 * LH_MIB, 3 * LH_MIB, 64 * LH_MIB);
    test.seed = 6; /* use a tier on SSD */
    put(&test, 0);
    LH_CHECK(taken_wait(&test) == 1);
    LH_CHECK(rig_flush(&test.rig, false) == 0);
    rig_saved_spoil(&test.rig);
    fetch(&test, 0);
    LH_CHECK(back_wait(&test, 0) == -EILSEQ);
    LH_CHECK(lh_engine_error(test.rig.engine, &err) == -EILSEQ);
    LH_CHECK(strstr(err.message, "saved tensors read") && strstr(err.message, "saved-saved"));
    test_shut(&test);
}

static void test_stop(const char *kind)
{
    lh_test_name("%s: stopped at any time, with saved tensors under way",
                 kind ? kind : "main memory");
    static struct saved_test test;
    int round_max = lh_test_is_fast() ? 4 : 20;
    for (int round = 0; round < round_max; round++) {
        test_open(&test, kind, 4 * LH_MIB, 3 * LH_MIB, 64 * LH_MIB);
        test.seed += (uint64_t)round;
        for (uint32_t i = 0; i < ITEM_COUNT; i++)
            put(&test, i);
        if (round % 2)
            LH_CHECK(taken_wait(&test) == 1);
        for (uint32_t i = 0; i < ITEM_COUNT && round % 4 == 3; i++)
            fetch(&test, i);
        lh_engine_stop(test.rig.engine);
        test_shut(&test);
    }
}

/* Whether the copy of a pinned unit ends, although nothing is computed. */
static bool load_ends(struct saved_test *test, uint32_t unit)
{
    struct lh_dev *dev = machine_of(test)->dev;
    uint64_t until_ns = lh_clock_now_ns(&test->rig.clock) + MACHINE_TIMEOUT_NS;
    while (!dev->ops->has_passed(dev, test->rig.engine->units[unit].copy.arrived)) {
        if (lh_clock_now_ns(&test->rig.clock) > until_ns)
            return false;
        usleep(1000);
    }
    return true;
}

static void test_fetch_holds_nothing_back(void)
{
    lh_test_name("parameters are loaded while the copy back of a saved tensor, which was started "
                 "before, waits until its target is free");
    static struct saved_test test;
    struct gate gate = GATE_INIT;
    const uint32_t item = 1;
    const uint32_t unit = 1;
    test_open(&test, "fake", 6 * LH_MIB, 3 * LH_MIB, 64 * LH_MIB);
    put(&test, item);
    LH_CHECK(taken_wait(&test) == 1);
    rig_device_drain(&test.rig);
    memset(test.sources[item], 0x33, test.bytes[item]);
    machine_hold(machine_of(&test), &gate);
    /* The target's memory was another tensor's, which is still to be computed. */
    compute(&test, test.targets[item], test.sources[item], test.bytes[item]);
    lh_saved_fetch(test.rig.engine, test.items[item], test.targets[item]);
    LH_CHECK(back_wait(&test, item) == 1);
    LH_CHECK(lh_engine_begin(test.rig.engine, LH_ENGINE_MODE_EVAL) == 0);
    LH_CHECK(rig_acquire(&test.rig, unit) == 0);
    LH_CHECK(load_ends(&test, unit));
    gate_open(&gate);
    check(&test, item);
    lh_engine_unpin(test.rig.engine, unit);
    lh_saved_drop(test.rig.engine, test.items[item]);
    LH_CHECK(rig_flush(&test.rig, false) == 0);
    all_free_check(&test);
    rig_device_check(&test.rig);
    test_shut(&test);
}

static const uint64_t *script; /* the times that a clock tells, in turn */

static uint64_t script_now(void *context)
{
    (void)context;
    return *script++;
}

static void ignore(struct lh_engine *engine, struct lh_copy *copy)
{
    (void)engine;
    (void)copy;
}

static void test_busy_link(void)
{
    static const struct {
        enum lh_dev_direction direction;
        bool is_aside;
        uint64_t times[2];
        uint64_t busy_ns;
    } rows[] = {
        {LH_DEV_DIRECTION_IN, false, {0, 10}, 10}, {LH_DEV_DIRECTION_IN, true, {5, 12}, 2},
        {LH_DEV_DIRECTION_IN, true, {12, 14}, 2},  {LH_DEV_DIRECTION_OUT, false, {0, 20}, 20},
        {LH_DEV_DIRECTION_IN, false, {10, 20}, 6}, {LH_DEV_DIRECTION_IN, false, {20, 30}, 10},
        {LH_DEV_DIRECTION_IN, true, {15, 40}, 10}, {LH_DEV_DIRECTION_IN, true, {40, 41}, 1},
    };
    lh_test_name("time in which copies back share the link with other copies counts once");
    uint8_t bytes[2] = {0};
    struct rig rig;
    rig_make(&rig, "saved-link",
             (struct rig_opts){.manual = true,
                               .in_memory = true,
                               .commit_every = 1,
                               .device = "emu",
                               .device_bytes = UINT64_C(1) << 20});
    struct lh_engine *engine = rig.engine;
    const struct lh_clock clock = rig.clock;
    rig_settle(&rig);
    const uint64_t *busy_ns = lh_core_stats(engine, lh_core_step(engine))->copy_busy_ns;
    for (size_t i = 0; i < LH_COUNT_OF(rows); i++) {
        struct lh_copy *copy = lh_copy_take(engine, LH_COPY_USER_UNIT);
        copy->done = ignore;
        copy->what = "a copy";
        copy->unit = LH_UNIT_NONE;
        copy->dev = (struct lh_dev_copy){.direction = rows[i].direction,
                                         .is_aside = rows[i].is_aside,
                                         .host = &bytes[0],
                                         .device = &bytes[1],
                                         .bytes = 1};
        uint64_t before_ns = busy_ns[rows[i].direction];
        script = rows[i].times;
        rig.clock.now_ns = script_now;
        LH_CHECK(lh_copy_submit(engine, copy));
        rig_settle(&rig);
        rig.clock = clock;
        LH_CHECK(busy_ns[rows[i].direction] - before_ns == rows[i].busy_ns);
    }
    rig_unmake(&rig);
}

int main(void)
{
    const char *const kinds[] = {NULL, "emu", "fake", "staged"};
    for (size_t i = 0; i < LH_COUNT_OF(kinds); i++) {
        test_round_trips(kinds[i], 3 * LH_MIB + 40960);
        test_round_trips(kinds[i], 6 * LH_MIB);
        test_stop(kinds[i]);
    }
    test_fetch_holds_nothing_back();
    test_busy_link();
    test_dropped_unread();
    test_refusals();
    test_wrong_byte();
    return 0;
}
