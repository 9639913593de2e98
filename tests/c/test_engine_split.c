/*
 * Test schedule auto: which units a split defers, that every split trains as in memory with the
 * bytes of its plan, and how steps' times decide which split stays.
 */
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define UNIT_COUNT_MAX 24
#define STEP_NS 3000000

/* The parts of an engine that a split reads. */
struct small {
    struct lh_alloc alloc;
    struct lh_engine engine;
    struct lh_unit units[UNIT_COUNT_MAX];
    struct lh_engine_unit descs[UNIT_COUNT_MAX];
    struct lh_unit_parts parts[UNIT_COUNT_MAX];
    struct lh_exec exec;
    uint64_t now_ns;
};

static struct small *small_make(uint32_t unit_count)
{
    static struct small small;
    lh_free(&small.alloc, small.engine.split);
    memset(&small, 0, sizeof(small));
    small.alloc = (struct lh_alloc)LH_ALLOC_INIT;
    small.engine.alloc = &small.alloc;
    small.exec.thread_count = 2;
    small.engine.exec = &small.exec;
    small.engine.units = small.units;
    small.engine.opts.unit_count = unit_count;
    small.engine.budget.gradient_waiting_bytes = UINT64_MAX;
    small.now_ns = 1000;
    for (uint32_t i = 0; i < unit_count; i++) {
        small.descs[i].elements = LH_ENGINE_ELEMENT_ALIGN;
        small.descs[i].dtype = LH_DTYPE_BF16;
        small.units[i].desc = &small.descs[i];
        small.units[i].parts = &small.parts[i];
    }
    LH_CHECK(lh_split_create(&small.engine, NULL) == 0);
    return &small;
}

static uint32_t deferred_count(const struct small *small)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < small->engine.opts.unit_count; i++)
        count += small->units[i].parts->defer.is_deferred;
    return count;
}

/* --- Which units ------------------------------------------------------------------------------ */

static void test_spread(void)
{
    lh_test_name("a split defers as many units as it says, spread evenly, and a model's ends only "
                 "if it is half of them or more");
    for (uint32_t count = 1; count <= UNIT_COUNT_MAX; count++) {
        struct small *small = small_make(count);
        LH_CHECK(deferred_count(small) == 0);
        for (uint32_t wanted = 0; wanted <= count + 2; wanted++) {
            uint32_t last = UINT32_MAX;
            uint32_t gap_min = UINT32_MAX;
            uint32_t gap_max = 0;
            lh_split_set(&small->engine, wanted);
            LH_CHECK(deferred_count(small) == (wanted < count ? wanted : count));
            LH_CHECK(small->engine.split->deferred_count == deferred_count(small));
            for (uint32_t i = 0; i < count; i++) {
                if (!small->units[i].parts->defer.is_deferred)
                    continue;
                if (last != UINT32_MAX) {
                    gap_min = i - last < gap_min ? i - last : gap_min;
                    gap_max = i - last > gap_max ? i - last : gap_max;
                }
                last = i;
            }
            LH_CHECK(gap_max == 0 || gap_max - gap_min <= 1);
            bool has_end = small->units[0].parts->defer.is_deferred ||
                           small->units[count - 1].parts->defer.is_deferred;
            LH_CHECK(has_end == (2 * wanted >= count));
        }
    }
}

static void test_frozen(void)
{
    lh_test_name("frozen units are neither deferred nor counted");
    struct small *small = small_make(9);
    for (uint32_t i = 0; i < 9; i += 2)
        small->descs[i].elements = 0;
    lh_split_set(&small->engine, 9);
    LH_CHECK(small->engine.split->deferred_count == 4);
    for (uint32_t i = 0; i < 9; i++)
        LH_CHECK(small->units[i].parts->defer.is_deferred == (i % 2 == 1));
}

static void test_room(void)
{
    lh_test_name("a split defers no more than has room for its gradients in memory");
    for (uint32_t room = 0; room <= 20; room++) {
        struct small *small = small_make(8);
        uint64_t bytes = 0;
        /* The units have 1, 2, 1, 2, ... times the bytes of 2048 elements in bf16. */
        for (uint32_t i = 1; i < 8; i += 2)
            small->descs[i].dtype = LH_DTYPE_F32;
        small->engine.budget.gradient_waiting_bytes = room * 4096ULL;
        lh_split_set(&small->engine, 8);
        for (uint32_t i = 0; i < 8; i++)
            bytes += small->units[i].parts->defer.is_deferred ? (i % 2 ? 8192 : 4096) : 0;
        LH_CHECK(bytes <= room * 4096ULL);
        LH_CHECK((deferred_count(small) == 8) == (room >= 12));
        LH_CHECK((deferred_count(small) == 0) == (room < 2));
        LH_CHECK(small->engine.split->deferred_count == deferred_count(small));
    }
}

/* --- Which split ------------------------------------------------------------------------------ */

/*
 * A step of total_ns, of which the first third is forward; the SSDs were busy for busy_ns, all of
 * it for updates, and the workers for update_ns.
 */
static void step(struct small *small, uint64_t total_ns, uint64_t busy_ns, uint64_t update_ns)
{
    const struct lh_engine_step_stats stats = {
        .begin_ns = small->now_ns,
        .close_ns = small->now_ns + total_ns,
        .end_ns = small->now_ns + 2 * total_ns,
        .ssd_busy_ns = busy_ns,
        .update_busy_ns = update_ns,
        .bytes = {[LH_ENGINE_LINK_STATE_READ] = 600, [LH_ENGINE_LINK_STATE_WRITE] = 400},
    };
    small->engine.split->gradient_ns = small->now_ns + total_ns / 3;
    lh_split_feature.step_over(&small->engine, &stats);
    small->now_ns += 2 * total_ns;
}

static void steps(struct small *small, uint32_t count, uint64_t total_ns)
{
    for (uint32_t i = 0; i < count; i++)
        step(small, total_ns, total_ns, 0);
}

/* Four steps with every unit eager, on a machine whose SSDs are always busy. */
static struct small *limited(void)
{
    struct small *small = small_make(12);
    lh_split_set(&small->engine, 0);
    small->engine.split->is_settled = false; /* as after creation */
    for (uint32_t i = 0; i < 3; i++) {
        steps(small, 1, STEP_NS);
        LH_CHECK(deferred_count(small) == 0 && !small->engine.split->is_settled);
    }
    steps(small, 1, STEP_NS);
    return small;
}

static void test_no_gain_possible(void)
{
    lh_test_name("if backward hides its load, every unit stays eager after four steps");
    struct small *small = small_make(12);
    for (uint32_t i = 0; i < 4; i++)
        step(small, STEP_NS, STEP_NS / 2, STEP_NS);
    LH_CHECK(small->engine.split->is_settled && deferred_count(small) == 0);
    steps(small, 20, STEP_NS);
    LH_CHECK(deferred_count(small) == 0); /* the choice is final */
}

static void test_candidate(void)
{
    lh_test_name("the split that is tried gives forward its share of the updates of the busiest "
                 "resource");
    struct small *small = limited();
    LH_CHECK(deferred_count(small) == 4); /* a third of the units is deferred */
    LH_CHECK(!small->engine.split->is_settled);
    small = small_make(12);
    for (uint32_t i = 0; i < 4; i++) /* there are two workers, each of them always busy */
        step(small, STEP_NS, STEP_NS / 4, 2 * (uint64_t)STEP_NS);
    LH_CHECK(deferred_count(small) == 4);
    small = small_make(12);
    for (uint32_t i = 0; i < 4; i++) {
        /* Forward has already read as much as its share. */
        small->engine.split->forward_bytes = 1000 / 3 + 1;
        step(small, STEP_NS, STEP_NS, 0);
    }
    LH_CHECK(small->engine.split->is_settled && deferred_count(small) == 0);
}

static void test_kept(void)
{
    lh_test_name("a split that is faster by more than half a percent stays; the fastest step "
                 "counts, and the first two do not");
    struct small *small = limited();
    steps(small, 2, 10 * (uint64_t)STEP_NS);
    steps(small, 1, 2 * (uint64_t)STEP_NS);
    LH_CHECK(!small->engine.split->is_settled);
    steps(small, 1, STEP_NS - STEP_NS / 200 - 1);
    LH_CHECK(small->engine.split->is_settled && deferred_count(small) == 4);
    steps(small, 20, 5 * (uint64_t)STEP_NS);
    LH_CHECK(deferred_count(small) == 4);
}

static void test_dropped(void)
{
    lh_test_name("a split that gains nothing is dropped at once, a slower one is halved first, and "
                 "the half is kept or dropped");
    struct small *small = limited();
    steps(small, 4, STEP_NS - STEP_NS / 200); /* half a percent faster, which is too little */
    LH_CHECK(small->engine.split->is_settled && deferred_count(small) == 0);

    for (int is_faster = 0; is_faster < 2; is_faster++) {
        small = limited();
        steps(small, 3, STEP_NS + STEP_NS / 100);
        LH_CHECK(deferred_count(small) == 4);
        steps(small, 1, STEP_NS + STEP_NS / 100);
        LH_CHECK(deferred_count(small) == 2 && !small->engine.split->is_settled);
        steps(small, 4, is_faster ? STEP_NS / 2 : STEP_NS * (uint64_t)2);
        LH_CHECK(small->engine.split->is_settled);
        LH_CHECK(deferred_count(small) == (is_faster ? 2 : 0));
    }
}

static void test_incomplete_steps(void)
{
    lh_test_name("a step without a forward of its own is no sample");
    struct small *small = limited();
    for (uint32_t i = 0; i < 10; i++) {
        const struct lh_engine_step_stats stats = {.begin_ns = small->now_ns,
                                                   .close_ns = small->now_ns + 1};
        small->engine.split->gradient_ns = small->now_ns - 1; /* a time in the previous step */
        lh_split_feature.step_over(&small->engine, &stats);
        small->now_ns += 2;
    }
    LH_CHECK(deferred_count(small) == 4 && !small->engine.split->is_settled);
    steps(small, 4, STEP_NS / 2);
    LH_CHECK(small->engine.split->is_settled && deferred_count(small) == 4);
}

/* --- In an engine ----------------------------------------------------------------------------- */

static void check_backward(const struct rig *rig)
{
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        const struct lh_unit *unit = &rig->engine->units[i];
        if (unit->desc->elements == 0)
            continue;
        LH_CHECK(unit->update.is_done == !unit->parts->defer.is_deferred);
        for (uint32_t j = 0; j < unit->desc->param_count; j++)
            LH_CHECK(lh_engine_gradient_is_consumed(rig->engine, unit->desc->param_first + j) ==
                     !unit->parts->defer.is_deferred);
    }
}

static void test_steps(uint64_t commit_every, bool least_memory)
{
    static const unsigned gradients[] = {RIG_GRADIENTS_ALL, 0xad, RIG_GRADIENTS_ALL, 0x6e};
    struct rig rig;
    uint32_t most = 0;
    lh_test_name("eager units are updated in backward and deferred ones after the close, for every "
                 "split, and it changes neither bits nor plans (a commit in %d steps, %s memory)",
                 (int)commit_every, least_memory ? "least" : "all");
    rig_make(&rig, "split-steps",
             (struct rig_opts){.manual = true,
                               .in_memory = true,
                               .least_memory = least_memory,
                               .schedule = LH_ENGINE_SCHEDULE_AUTO,
                               .commit_every = commit_every});
    for (uint32_t i = 0; i < 12; i++) {
        uint32_t expected = 0;
        lh_split_set(rig.engine, i / 2);
        most = rig.engine->split->deferred_count > most ? rig.engine->split->deferred_count : most;
        bool is_complete = gradients[i % 4] == RIG_GRADIENTS_ALL;
        LH_CHECK(rig_forward_backward(&rig, gradients[i % 4]) == 0);
        rig_settle(&rig);
        if (is_complete)
            check_backward(&rig);
        for (uint32_t j = 0; j < RIG_UNIT_COUNT; j++)
            expected += rig.engine->units[j].parts->defer.is_deferred &&
                        rig.engine->units[j].update.gradient_count > 0;
        LH_CHECK(rig_close(&rig, gradients[i % 4]) == 0);
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == 0);
        LH_CHECK(rig_over_as_planned(&rig).deferred_units == expected);
    }
    LH_CHECK(least_memory ? most == 0 : most >= 1 && most < RIG_UNIT_COUNT - 1);
    rig_finish(&rig);
}

int main(void)
{
    test_spread();
    test_frozen();
    test_room();
    test_no_gain_possible();
    test_candidate();
    test_kept();
    test_dropped();
    test_incomplete_steps();
    test_steps(1, false);
    test_steps(3, false);
    test_steps(1, true);
    return 0;
}
