/*
 * Test which units are in main memory and when: places never overlap, the order of uses predicts
 * the next step's reads, and unexpected uses are served, counted and forgotten.
 */
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define PARAM_READ LH_ENGINE_LINK_PARAM_READ

static struct rig_opts opts_of(bool least_memory)
{
    return (struct rig_opts){
        .manual = true, .in_memory = true, .least_memory = least_memory, .commit_every = 1};
}

/* Use units in an order: a forward that keeps handles, or an evaluation. */
static void uses(struct rig *rig, enum lh_engine_mode mode, const uint32_t *order, uint32_t count)
{
    LH_CHECK(lh_engine_begin(rig->engine, mode) == 0);
    for (uint32_t i = 0; i < count; i++) {
        LH_CHECK(rig_acquire(rig, order[i]) == 0);
        if (mode == LH_ENGINE_MODE_TRAIN)
            lh_engine_handle_add(rig->engine, order[i]);
        lh_engine_unpin(rig->engine, order[i]);
    }
    for (uint32_t i = 0; mode == LH_ENGINE_MODE_TRAIN && i < RIG_UNIT_COUNT; i++) {
        if (lh_engine_handle_count(rig->engine, i) == 0)
            lh_engine_handle_add(rig->engine, i);
    }
}

/* Run a step whose forward uses all units in the given order. */
static struct lh_engine_step_stats step_in(struct rig *rig, const uint32_t *order, uint32_t count)
{
    uses(rig, LH_ENGINE_MODE_TRAIN, order, count);
    LH_CHECK(rig_backward(rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_close(rig, RIG_GRADIENTS_ALL) == 0);
    return rig_over_as_planned(rig);
}

static const uint32_t natural[] = {0, 1, 2, 3, 4, 5};
static const uint32_t mixed[] = {0, 4, 2, 5, 1, 3};

/* --- Places ----------------------------------------------------------------------------------- */

static void places_watch(struct rig *rig)
{
    const struct lh_unit *units = rig->engine->units;
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        bool is_ready = lh_unit_pins(&units[i]) > 0 || (units[i].shared.word & LH_UNIT_READY_BIT);
        LH_CHECK(!is_ready || units[i].state == LH_UNIT_STATE_READY);
        if (units[i].state == LH_UNIT_STATE_ABSENT)
            continue;
        LH_CHECK(units[i].offset + units[i].desc->place_bytes <= rig->budget.region_bytes);
        LH_CHECK(lh_is_aligned(units[i].offset, LH_BLOCK_BYTES));
        for (uint32_t j = 0; j < i; j++)
            LH_CHECK(units[j].state == LH_UNIT_STATE_ABSENT ||
                     units[j].offset + units[j].desc->place_bytes <= units[i].offset ||
                     units[i].offset + units[i].desc->place_bytes <= units[j].offset);
    }
}

static void test_places(uint64_t spare_bytes, uint64_t beside_bytes)
{
    struct rig rig;
    uint64_t seed = spare_bytes + beside_bytes;
    struct rig_opts opts = opts_of(true);
    lh_test_name("at every moment units lie in the region apart from one another, those in use are "
                 "there, and the one that encloses others is read once (%d and %d bytes more)",
                 (int)spare_bytes, (int)beside_bytes);
    opts.spare_bytes = spare_bytes;
    opts.beside_bytes = beside_bytes;
    rig_make(&rig, "region-places", opts);
    rig.watch = places_watch;
    for (int i = 0; i < 4; i++) {
        uint32_t order[12];
        for (size_t j = 0; j < LH_COUNT_OF(order); j++)
            order[j] = (uint32_t)(lh_test_random(&seed) % RIG_UNIT_COUNT);
        step_in(&rig, natural, RIG_UNIT_COUNT);
        uses(&rig, LH_ENGINE_MODE_EVAL, order, LH_COUNT_OF(order));
    }
    rig_settle(&rig);
    LH_CHECK(rig.engine->units[0].shared.load_count == 1 && rig.engine->units[0].offset == 0);
    rig.watch = NULL;
    rig_finish(&rig);
}

static void test_all_in_memory(void)
{
    struct rig rig;
    lh_test_name("with room for all, every unit is read once and never again, whatever its order");
    rig_make(&rig, "region-all", opts_of(false));
    uint64_t all_bytes = 0;
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        all_bytes += rig.units[i].bytes;
    for (int i = 0; i < 4; i++) {
        struct lh_engine_step_stats stats = step_in(&rig, i % 2 ? mixed : natural, RIG_UNIT_COUNT);
        LH_CHECK(stats.bytes[PARAM_READ] == (i == 0 ? all_bytes : 0));
        uses(&rig, LH_ENGINE_MODE_EVAL, mixed, 3);
    }
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        LH_CHECK(rig.engine->units[i].shared.load_count == 1);
    rig_finish(&rig);
}

static void test_pinned(void)
{
    struct rig rig;
    lh_test_name("a unit with a lend stays where it is while others come and go; it may leave "
                 "after the last lend");
    rig_make(&rig, "region-pinned", opts_of(true));
    LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
    LH_CHECK(rig_acquire(&rig, 5) == 0);
    lh_engine_pin(rig.engine, 5);
    lh_engine_unpin(rig.engine, 5);
    LH_CHECK(lh_engine_pin_count(rig.engine, 5) == 1);
    const uint8_t *address = lh_engine_address(rig.engine, 5);
    uint8_t *bytes = malloc(rig.units[5].bytes);
    LH_CHECK(bytes);
    memcpy(bytes, address, rig.units[5].bytes);
    static const uint32_t order[] = {1, 3, 4, 2, 4, 3, 1};
    for (size_t i = 0; i < LH_COUNT_OF(order); i++) {
        LH_CHECK(rig_acquire(&rig, order[i]) == 0);
        lh_engine_unpin(rig.engine, order[i]);
    }
    LH_CHECK(lh_engine_address(rig.engine, 5) == address);
    LH_CHECK(memcmp(bytes, address, rig.units[5].bytes) == 0);
    LH_CHECK(rig.engine->units[5].shared.load_count == 1);
    free(bytes);
    lh_engine_unpin(rig.engine, 5);
    for (int i = 0; i < 3; i++)
        uses(&rig, LH_ENGINE_MODE_EVAL, natural, RIG_UNIT_COUNT);
    LH_CHECK(rig.engine->units[5].shared.load_count > 1);
    rig_finish(&rig);
}

/* --- Predictions ------------------------------------------------------------------------------ */

static void test_first_step(void)
{
    struct rig rig;
    lh_test_name("a first step in the order of the units needs no new plan, one in another order "
                 "is a wrong guess that the second step does not repeat");
    for (int i = 0; i < 2; i++) {
        const uint32_t *order = i ? mixed : natural;
        rig_make(&rig, "region-first", opts_of(true));
        LH_CHECK((step_in(&rig, order, RIG_UNIT_COUNT).replans == 0) == (i == 0));
        uint64_t read_bytes = step_in(&rig, order, RIG_UNIT_COUNT).bytes[PARAM_READ];
        for (int j = 0; j < 3; j++) {
            struct lh_engine_step_stats stats = step_in(&rig, order, RIG_UNIT_COUNT);
            LH_CHECK(stats.replans == 0 && stats.bytes[PARAM_READ] > 0);
            LH_CHECK(stats.bytes[PARAM_READ] <= read_bytes);
        }
        rig_finish(&rig);
    }
}

static void test_planned_at_begin(void)
{
    struct rig rig;
    lh_test_name("what a step in the last one's order will read is known when it begins");
    rig_make(&rig, "region-begin", opts_of(true));
    for (int i = 0; i < 4; i++)
        step_in(&rig, mixed, RIG_UNIT_COUNT);
    LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_TRAIN) == 0);
    rig_poll(&rig);
    uint64_t planned[LH_ENGINE_LINK_COUNT];
    memcpy(planned, lh_core_stats(rig.engine, rig.step + 1)->planned_bytes, sizeof(planned));
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        LH_CHECK(rig_acquire(&rig, mixed[i]) == 0);
        lh_engine_handle_add(rig.engine, mixed[i]);
        lh_engine_unpin(rig.engine, mixed[i]);
    }
    LH_CHECK(rig_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
    struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
    LH_CHECK(planned[PARAM_READ] > 0 && memcmp(planned, stats.bytes, sizeof(planned)) == 0);
    rig_finish(&rig);
}

static void test_changed_order(void)
{
    static const uint32_t shorter[] = {0, 1, 3, 4, 5}; /* this order lacks unit 2 */
    static const uint32_t longer[] = {0, 1, 2, 3, 1, 4, 5};
    static const struct {
        const uint32_t *order;
        uint32_t count;
    } changes[] = {{mixed, 6}, {natural, 6}, {shorter, 5}, {longer, 7}, {natural, 6}};
    struct rig rig;
    lh_test_name("a step whose order changes is replanned, the steps after it in the same order "
                 "are not");
    rig_make(&rig, "region-changed", opts_of(true));
    step_in(&rig, natural, RIG_UNIT_COUNT);
    step_in(&rig, natural, RIG_UNIT_COUNT);
    for (size_t i = 0; i < LH_COUNT_OF(changes); i++) {
        for (int j = 0; j < 3; j++) {
            struct lh_engine_step_stats stats = step_in(&rig, changes[i].order, changes[i].count);
            LH_CHECK(j == 0 ? stats.replans > 0 : stats.replans == 0);
        }
    }
    rig_finish(&rig);
}

static void test_extra_use(void)
{
    static const uint32_t extra[] = {5, 0, 1, 2, 3, 4, 5};
    static const uint32_t last[] = {5};
    struct rig rig;
    lh_test_name("a use in addition to the recorded ones does not discard the plan, unless the "
                 "next use is not the planned one either");
    rig_make(&rig, "region-extra", opts_of(true));
    for (int i = 0; i < 3; i++)
        step_in(&rig, natural, RIG_UNIT_COUNT);
    LH_CHECK(step_in(&rig, extra, LH_COUNT_OF(extra)).replans <= 3);
    LH_CHECK(step_in(&rig, natural, RIG_UNIT_COUNT).replans <= 2);
    LH_CHECK(step_in(&rig, natural, RIG_UNIT_COUNT).replans == 0);
    LH_CHECK(step_in(&rig, last, LH_COUNT_OF(last)).replans <= 3);
    rig_finish(&rig);
}

static void test_evaluations(void)
{
    static const uint32_t backwards[] = {5, 4, 3, 2, 1, 0};
    struct rig rig;
    lh_test_name("evaluations between steps have their own order, and steps keep theirs");
    rig_make(&rig, "region-eval", opts_of(true));
    for (int i = 0; i < 6; i++) {
        uint64_t replans = rig.engine->stats[LH_STATS_OF_EVALUATIONS].replans;
        LH_CHECK(step_in(&rig, natural, RIG_UNIT_COUNT).replans == 0);
        for (int j = 0; j < (i < 4 ? 1 : 3); j++)
            uses(&rig, LH_ENGINE_MODE_EVAL, backwards, RIG_UNIT_COUNT);
        rig_settle(&rig);
        /* The first one was guessed. */
        LH_CHECK((rig.engine->stats[LH_STATS_OF_EVALUATIONS].replans > replans) == (i == 0));
    }
    rig_finish(&rig);
}

static void test_given_up(void)
{
    struct rig rig;
    lh_test_name("a forward that is given up, or repeated, predicts nothing; the next whole one "
                 "follows the last step's order");
    rig_make(&rig, "region-given-up", opts_of(true));
    for (int i = 0; i < 3; i++)
        step_in(&rig, mixed, RIG_UNIT_COUNT);
    uses(&rig, LH_ENGINE_MODE_TRAIN, natural, 3);
    rig_handles_drop(&rig);
    /* The events that counted for the step were its own replans. */
    LH_CHECK(rig_abort(&rig) == 0);
    LH_CHECK(step_in(&rig, mixed, RIG_UNIT_COUNT).replans == 0);
    uses(&rig, LH_ENGINE_MODE_TRAIN, mixed, 2);
    rig_handles_drop(&rig);
    LH_CHECK(step_in(&rig, mixed, RIG_UNIT_COUNT).replans == 0);
    rig_finish(&rig);
}

static void test_demand(void)
{
    struct rig rig;
    lh_test_name(
        "a unit that is being prefetched is read before others once a thread waits for it");
    rig_make(&rig, "region-demand", opts_of(false));
    rig.holds.requests = LH_IO_FAULT_ON(LH_IO_KIND_READ);
    LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
    rig_settle(&rig);
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        LH_CHECK(rig.engine->units[i].state == LH_UNIT_STATE_LOADING);
        LH_CHECK(rig.engine->units[i].load.priority == LH_PRIORITY_PREFETCH);
    }
    LH_CHECK(lh_engine_acquire(rig.engine, 5) == 0);
    rig_settle(&rig);
    LH_CHECK(rig.engine->units[5].load.priority == LH_PRIORITY_DEMAND);
    LH_CHECK(lh_engine_acquire_wait(rig.engine, 5, 0) == 0);
    rig.holds.requests = 0;
    uint32_t loaded_count = 0;
    while (lh_engine_acquire_wait(rig.engine, 5, 0) == 0)
        LH_CHECK(rig_poll(&rig));
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        loaded_count += rig.engine->units[i].state == LH_UNIT_STATE_READY;
    /* it did not wait until everything that was requested before was loaded */
    LH_CHECK(loaded_count <= 5);
    lh_engine_unpin(rig.engine, 5);
    rig_finish(&rig);
}

static void test_recording_overflow(void)
{
    struct rig rig;
    lh_test_name("a cycle too long to remember is served, and predicts nothing");
    rig_make(&rig, "region-long", opts_of(false));
    LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
    for (uint64_t i = 0; i <= rig.engine->event_max / 2; i++) {
        LH_CHECK(rig_acquire(&rig, (uint32_t)(i % RIG_UNIT_COUNT)) == 0);
        lh_engine_unpin(rig.engine, (uint32_t)(i % RIG_UNIT_COUNT));
        rig_settle(&rig);
    }
    LH_CHECK(rig.engine->recording.overflowed);
    LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
    rig_settle(&rig);
    LH_CHECK(!rig.engine->recording.overflowed);
    LH_CHECK(rig.engine->recorded[LH_ENGINE_MODE_EVAL].count == 0);
    step_in(&rig, natural, RIG_UNIT_COUNT);
    rig_finish(&rig);
}

int main(void)
{
    test_places(0, 0);
    test_places(20480, 0);
    test_places(0, 2 * LH_BLOCK_BYTES);
    test_all_in_memory();
    test_pinned();
    test_first_step();
    test_planned_at_begin();
    test_changed_order();
    test_extra_use();
    test_evaluations();
    test_given_up();
    test_demand();
    test_recording_overflow();
    return 0;
}
