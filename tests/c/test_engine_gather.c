/*
 * Test engines whose accelerators gather units from parts: each copies a part of a unit over its
 * own link, and a thread for each of them brings the other parts.
 */
#include <pthread.h>
#include <sched.h>

#include "base/thread.h"
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_device.h"
#include "rig_team.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define LONG_NS UINT64_C(60000000000)
#define COUNT 2

struct pair;

struct side {
    struct rig rig;
    struct pair *pair;
    uint32_t number;
    pthread_t gatherer;
};

struct pair {
    struct side sides[COUNT]; /* the owner, and its mate */
    pthread_barrier_t barrier;
    pthread_barrier_t meeting; /* of the threads that gather */
    uint32_t units[COUNT];
    uint8_t *places[COUNT];
    uint64_t gathers_max; /* the connection breaks after as many gathers */
    uint64_t gathers;
    int steps;
    bool is_alone;
};

/* Gather units, as long as the engine has some. Both sides gather the same units in one order. */
static void *gatherer_run(void *context)
{
    struct side *side = context;
    struct pair *pair = side->pair;
    struct lh_engine *engine = side->rig.engine;
    uint32_t unit = 0;
    int rc = 0;
    while ((rc = lh_gather_next(engine, &unit, 100)) >= 0) {
        if (rc == 0)
            continue;
        uint32_t other = 1 - side->number;
        uint64_t bytes = side->rig.units[unit].bytes;
        uint64_t first = lh_gather_edge(bytes, COUNT, other);
        uint64_t end = lh_gather_edge(bytes, COUNT, other + 1);
        pair->units[side->number] = unit;
        pair->places[side->number] = lh_engine_address(engine, unit);
        pthread_barrier_wait(&pair->meeting);
        LH_CHECK(pair->units[other] == unit);
        bool is_complete = pair->gathers < pair->gathers_max;
        if (is_complete)
            memcpy(pair->places[side->number] + first, pair->places[other] + first, end - first);
        pthread_barrier_wait(&pair->meeting);
        if (side->number == 0)
            pair->gathers++;
        pthread_barrier_wait(&pair->meeting);
        lh_gather_done(engine, unit, is_complete);
    }
    return NULL;
}

static void pair_make(struct pair *pair, const char *name, uint64_t wait_ns)
{
    static char mate_name[64];
    struct rig_opts opts = {
        .in_memory = true,
        .plain_gradients = true,
        .schedule = LH_ENGINE_SCHEDULE_SERIAL,
        .commit_every = 1,
        .device = "emu",
        .device_bytes = 8192 + 2 * 16384, /* as in test_engine_device.c: few units fit */
        .team_mates = 1,
        .gather_wait_ns = wait_ns,
    };
    snprintf(mate_name, sizeof(mate_name), "%s-mate", name);
    LH_CHECK(pthread_barrier_init(&pair->barrier, NULL, COUNT) == 0);
    LH_CHECK(pthread_barrier_init(&pair->meeting, NULL, COUNT) == 0);
    rig_make(&pair->sides[0].rig, name, opts);
    opts.commit_every = LH_ENGINE_COMMIT_NEVER;
    opts.team_of = &pair->sides[0].rig;
    opts.team_mate = 1;
    rig_make(&pair->sides[1].rig, mate_name, opts);
    for (uint32_t i = 0; i < COUNT; i++) {
        struct side *side = &pair->sides[i];
        side->pair = pair;
        side->number = i;
        LH_CHECK(lh_thread_start(&side->gatherer, NULL, gatherer_run, side) == 0);
    }
}

static void pair_unmake(struct pair *pair)
{
    for (uint32_t i = COUNT; i-- > 0;) {
        rig_device_check(&pair->sides[i].rig);
        lh_engine_stop(pair->sides[i].rig.engine);
        LH_CHECK(pthread_join(pair->sides[i].gatherer, NULL) == 0);
    }
    for (uint32_t i = COUNT; i-- > 0;) /* what wakes an engine must outlast the other engine */
        rig_unmake(&pair->sides[i].rig);
    pthread_barrier_destroy(&pair->barrier);
    pthread_barrier_destroy(&pair->meeting);
}

static void *mate_run(void *context)
{
    struct pair *pair = context;
    struct rig *rig = &pair->sides[1].rig;
    for (int i = 0; i < pair->steps; i++) {
        if (!pair->is_alone || i % 2 == 0) {
            LH_CHECK(rig_forward(rig, LH_ENGINE_MODE_TRAIN) == 0);
            for (uint32_t j = RIG_UNIT_COUNT; j-- > 0;) {
                LH_CHECK(rig_acquire(rig, j) == 0);
                lh_engine_handle_drop(rig->engine, j);
                lh_engine_unpin(rig->engine, j);
            }
        }
        lh_gather_wait(rig->engine, true);
        pthread_barrier_wait(&pair->barrier); /* the end of both backwards */
        lh_gather_wait(rig->engine, false);
        lh_gather_round(rig->engine, (uint64_t)i + 1);
        rig_team_give_back(rig);
        pthread_barrier_wait(&pair->barrier); /* the owner updates */
        pthread_barrier_wait(&pair->barrier);
        rig_team_follow(rig, &pair->sides[0].rig);
        pthread_barrier_wait(&pair->barrier);
    }
    return NULL;
}

/* Train, and return the bytes of the last step over two links of the owner. */
static void pair_train(struct pair *pair, int steps, uint64_t *copied, uint64_t *gathered)
{
    struct rig *owner = &pair->sides[0].rig;
    pthread_t thread;
    pair->steps = steps;
    LH_CHECK(lh_thread_start(&thread, NULL, mate_run, pair) == 0);
    for (int i = 0; i < steps; i++) {
        LH_CHECK(rig_forward_backward(owner, RIG_GRADIENTS_ALL) == 0);
        pthread_barrier_wait(&pair->barrier);
        lh_gather_round(owner->engine, (uint64_t)i + 1);
        pthread_barrier_wait(&pair->barrier);
        LH_CHECK(rig_close(owner, RIG_GRADIENTS_ALL) == 0);
        struct lh_engine_step_stats stats = rig_over_as_planned(owner);
        *copied = stats.bytes[LH_ENGINE_LINK_COPY_IN];
        *gathered = stats.bytes[LH_ENGINE_LINK_GATHERED];
        pthread_barrier_wait(&pair->barrier);
        pthread_barrier_wait(&pair->barrier);
    }
    LH_CHECK(pthread_join(thread, NULL) == 0);
    struct lh_engine_step_stats stats;
    LH_CHECK(lh_engine_stats(pair->sides[1].rig.engine, &stats));
    for (int i = 0; i < LH_ENGINE_LINK_COUNT; i++)
        LH_CHECK(stats.bytes[i] == stats.planned_bytes[i]);
}

static void test_equal(void)
{
    struct pair pair = {.gathers_max = UINT64_MAX};
    uint64_t copied = 0;
    uint64_t gathered = 0;
    lh_test_name("every use sees the step's bytes, of which other accelerators give a part");
    pair_make(&pair, "gather", LONG_NS);
    pair_train(&pair, 6, &copied, &gathered);
    LH_CHECK(pair.gathers > 0 && gathered > 0 && copied >= gathered);
    pair_unmake(&pair);
}

static void test_absent(void)
{
    struct pair pair = {.gathers_max = UINT64_MAX, .is_alone = true};
    uint64_t copied = 0;
    uint64_t gathered = 0;
    struct lh_clock clock = lh_clock_real();
    uint64_t began = lh_clock_now_ns(&clock);
    lh_test_name("a process that makes no uses in a step is not waited for");
    pair_make(&pair, "gather-alone", LONG_NS);
    pair_train(&pair, 6, &copied, &gathered);
    LH_CHECK(copied > 0 && lh_clock_now_ns(&clock) - began < LONG_NS);
    pair_unmake(&pair);
}

static void test_late(void)
{
    struct pair pair = {.gathers_max = UINT64_MAX, .is_alone = true};
    uint64_t copied = 0;
    uint64_t gathered = 0;
    lh_test_name("a wait for a process that does not come ends, and units are copied whole");
    pair_make(&pair, "gather-late", 1000000);
    pair_train(&pair, 3, &copied, &gathered);
    struct rig *owner = &pair.sides[0].rig;
    for (int i = 0; i < 3; i++) /* the mate does not know of these */
        LH_CHECK(rig_forward(owner, LH_ENGINE_MODE_TRAIN) == 0);
    rig_handles_drop(owner);
    pair_unmake(&pair);
}

static void test_broken(void)
{
    struct pair pair = {.gathers_max = 7};
    uint64_t copied = 0;
    uint64_t gathered = 0;
    lh_test_name("once connections are broken, units are copied whole");
    pair_make(&pair, "gather-broken", LONG_NS);
    pair_train(&pair, 5, &copied, &gathered);
    LH_CHECK(pair.gathers > 7 && gathered == 0 && copied > 0);
    pair_unmake(&pair);
}

/* Use units in the given direction, some of them twice. */
static void wander(struct rig *rig, bool is_forward)
{
    LH_CHECK(lh_engine_begin(rig->engine, LH_ENGINE_MODE_TRAIN) == 0);
    for (uint32_t i = 0; i < 3 * RIG_UNIT_COUNT; i++) {
        uint32_t at = i * 5 % (2 * RIG_UNIT_COUNT) / 2;
        uint32_t unit = is_forward ? at : RIG_UNIT_COUNT - 1 - at;
        LH_CHECK(rig_acquire(rig, unit) == 0);
        lh_engine_unpin(rig->engine, unit);
    }
}

static void *wander_run(void *context)
{
    struct pair *pair = context;
    for (int i = 0; i < pair->steps; i++)
        wander(&pair->sides[1].rig, false);
    lh_gather_wait(pair->sides[1].rig.engine, true); /* the owner may still need units */
    return NULL;
}

static void test_crossed(void)
{
    struct pair pair = {.gathers_max = UINT64_MAX};
    uint64_t copied = 0;
    uint64_t gathered = 0;
    pthread_t thread;
    lh_test_name("processes that use units in opposite orders do not wait for each other");
    pair_make(&pair, "gather-crossed", LONG_NS);
    pair_train(&pair, 2, &copied, &gathered);
    pair.steps = 4;
    struct lh_clock clock = lh_clock_real();
    uint64_t began = lh_clock_now_ns(&clock);
    LH_CHECK(lh_thread_start(&thread, NULL, wander_run, &pair) == 0);
    for (int i = 0; i < pair.steps; i++)
        wander(&pair.sides[0].rig, true);
    lh_gather_wait(pair.sides[0].rig.engine, true);
    LH_CHECK(pthread_join(thread, NULL) == 0);
    LH_CHECK(lh_clock_now_ns(&clock) - began < LONG_NS);
    pair_unmake(&pair);
}

/* Use units until a thread waits for one that only this process has offered; return it. */
static uint32_t missing(struct side *side)
{
    struct rig *rig = &side->rig;
    uint32_t unit = 0;
    int rc = 1;
    LH_CHECK(lh_engine_begin(rig->engine, LH_ENGINE_MODE_TRAIN) == 0);
    for (; unit < RIG_UNIT_COUNT && rc == 1; unit += (uint32_t)rc) {
        rc = lh_engine_acquire(rig->engine, unit);
        while (rc == 0 && !(lh_team_offers(rig->team, unit) >> side->number & 1))
            rc = lh_engine_acquire_wait(rig->engine, unit, 1);
        if (rc == 1)
            lh_engine_unpin(rig->engine, unit);
    }
    LH_CHECK(rc == 0 && unit < RIG_UNIT_COUNT);
    return unit;
}

static void test_ended(uint32_t number, bool is_abort)
{
    struct pair pair = {.gathers_max = UINT64_MAX};
    uint64_t copied = 0;
    uint64_t gathered = 0;
    lh_test_name(is_abort ? "an abort does not wait for the other process's parts"
                          : "a flush does not wait for the other process's parts");
    pair_make(&pair, "gather-ended", LONG_NS);
    pair_train(&pair, 3, &copied, &gathered);
    for (uint32_t i = 0; i < COUNT; i++) /* the first units of the next step may be on their way */
        LH_CHECK(rig_flush(&pair.sides[i].rig, false) == 0);
    struct rig *rig = &pair.sides[number].rig;
    struct lh_clock clock = lh_clock_real();
    uint64_t began = lh_clock_now_ns(&clock);
    uint32_t unit = missing(&pair.sides[number]);
    LH_CHECK((is_abort ? rig_abort(rig) : rig_flush(rig, false)) == 0);
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        LH_CHECK((lh_team_offers(rig->team, i) >> number & 1) == 0);
    LH_CHECK(lh_engine_acquire_wait(rig->engine, unit, 60000) == 1);
    lh_engine_unpin(rig->engine, unit);
    LH_CHECK(lh_clock_now_ns(&clock) - began < LONG_NS / 2);
    for (uint32_t i = 0; i < COUNT; i++)
        LH_CHECK(rig_forward(&pair.sides[i].rig, LH_ENGINE_MODE_EVAL) == 0);
    pair_unmake(&pair);
}

static void test_parts(void)
{
    lh_test_name("parts cover a unit without gaps, and differ by less than their alignment");
    for (uint64_t bytes = LH_BLOCK_BYTES; bytes < 40 * LH_BLOCK_BYTES; bytes += LH_BLOCK_BYTES) {
        for (uint32_t count = 1; count <= 8; count++) {
            LH_CHECK(lh_gather_edge(bytes, count, 0) == 0);
            LH_CHECK(lh_gather_edge(bytes, count, count) == bytes);
            for (uint32_t i = 0; i < count; i++) {
                uint64_t first = lh_gather_edge(bytes, count, i);
                uint64_t end = lh_gather_edge(bytes, count, i + 1);
                LH_CHECK(first < end && first % 64 == 0);
                LH_CHECK(end - first + 64 > bytes / count && end - first < bytes / count + 128);
            }
        }
    }
}

static void test_link_bytes(void)
{
    struct lh_team team = {.mate_count = 3, .mate = 2};
    struct lh_engine_opts opts = {.team = &team};
    lh_test_name(
        "a load moves a part over the link if gathers are on and the unit is large enough");
    LH_CHECK(lh_gather_link_bytes(&opts, 1 << 20) == 1 << 20);
    opts.gather_wait_ns = 1;
    LH_CHECK(lh_gather_link_bytes(&opts, 1 << 20) == 1 << 18);
    LH_CHECK(lh_gather_link_bytes(&opts, 4 * LH_BLOCK_BYTES) == LH_BLOCK_BYTES);
    LH_CHECK(lh_gather_link_bytes(&opts, 3 * LH_BLOCK_BYTES) == 3 * LH_BLOCK_BYTES);
}

static void test_refused(void)
{
    struct pair pair = {.gathers_max = UINT64_MAX};
    struct lh_engine *engine = NULL;
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_error err = {0};
    lh_test_name("gathers without a team or an accelerator, or of too many processes, are refused");
    pair_make(&pair, "gather-refused", LONG_NS);
    struct lh_team many = *pair.sides[0].rig.team;
    many.mate_count = LH_TEAM_GATHERING_COUNT_MAX;
    for (int i = 0; i < 3; i++) {
        struct lh_engine_opts opts = rig_engine_opts(&pair.sides[0].rig);
        opts.team = i == 0 ? NULL : i == 1 ? &many : opts.team;
        opts.dev = i == 2 ? NULL : opts.dev;
        LH_CHECK(lh_engine_create(&opts, &alloc, &engine, &err) == -EINVAL && !engine);
        const char *said = i == 1 ? "63 processes of one machine cannot gather units, only 62"
                                  : "gathers need a team and an accelerator";
        LH_CHECK(strcmp(err.message, said) == 0);
        LH_CHECK(alloc.live_count == 0);
    }
    pair_unmake(&pair);
}

int main(void)
{
    test_parts();
    test_link_bytes();
    test_refused();
    test_crossed();
    for (uint32_t i = 0; i < COUNT; i++) {
        test_ended(i, false);
        test_ended(i, true);
    }
    test_equal();
    test_absent();
    test_late();
    test_broken();
    return 0;
}
