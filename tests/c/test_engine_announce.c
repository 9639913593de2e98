/*
 * Test uses that are announced: their units are prefetched in the announced order, and never
 * because of earlier steps; announcements that turn out wrong cost time and no bytes too many.
 */
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

static const uint32_t marked[] = {2, 3, 4};

static void rig_begin(struct rig *rig, const char *name, uint64_t spare_bytes)
{
    rig_make(rig, name,
             (struct rig_opts){.manual = true,
                               .in_memory = true,
                               .least_memory = true,
                               .spare_bytes = spare_bytes,
                               .announced = 1u << 2 | 1u << 3 | 1u << 4,
                               .commit_every = 1});
}

static uint32_t load_count(struct rig *rig, uint32_t unit)
{
    return atomic_load(&rig->engine->units[unit].shared.load_count);
}

static void use(struct rig *rig, uint32_t unit)
{
    LH_CHECK(rig_acquire(rig, unit) == 0);
    lh_engine_unpin(rig->engine, unit);
}

/* An evaluation that uses units 0 and 1, those that are given, and unit 5. */
static void evaluate(struct rig *rig, const uint32_t *units, uint32_t count, bool is_announced)
{
    LH_CHECK(lh_engine_begin(rig->engine, LH_ENGINE_MODE_EVAL) == 0);
    use(rig, 0);
    use(rig, 1);
    if (is_announced)
        lh_engine_announce(rig->engine, units, count);
    for (uint32_t i = 0; i < count; i++)
        use(rig, units[i]);
    use(rig, 5);
    rig_settle(rig);
}

static void test_prefetch(void)
{
    struct rig rig;
    lh_test_name("announced units are read before they are needed, and no others are, although the "
                 "last cycle or the first guess had them");
    rig_begin(&rig, "announce-prefetch", 0);
    LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
    rig_settle(&rig);
    for (size_t i = 0; i < LH_COUNT_OF(marked); i++)
        LH_CHECK(load_count(&rig, marked[i]) == 0);
    evaluate(&rig, (const uint32_t[]){3, 4}, 2, true);
    LH_CHECK(load_count(&rig, 3) == 1 && load_count(&rig, 4) == 1);
    uint64_t replans = rig.engine->stats[LH_STATS_OF_EVALUATIONS].replans;
    evaluate(&rig, (const uint32_t[]){2}, 1, true);
    LH_CHECK(load_count(&rig, 2) == 1);
    uint32_t before[] = {load_count(&rig, 3), load_count(&rig, 4)};
    evaluate(&rig, (const uint32_t[]){2}, 1, true);
    LH_CHECK(load_count(&rig, 3) == before[0] && load_count(&rig, 4) == before[1]);

    LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
    use(&rig, 0);
    use(&rig, 1);
    const uint32_t next = rig.engine->units[3].state == LH_UNIT_STATE_ABSENT ? 3 : 4;
    LH_CHECK(rig.engine->units[next].state == LH_UNIT_STATE_ABSENT);
    uint32_t loads = load_count(&rig, next);
    lh_engine_announce(rig.engine, &next, 1);
    rig_settle(&rig); /* nobody has asked for the unit yet */
    LH_CHECK(load_count(&rig, next) == loads + 1);
    use(&rig, next);
    LH_CHECK(load_count(&rig, next) == loads + 1);
    use(&rig, 5);
    evaluate(&rig, (const uint32_t[]){4, 2, 3}, 3, true);
    LH_CHECK(rig.engine->stats[LH_STATS_OF_EVALUATIONS].replans == replans);
    rig_finish(&rig);
}

static void test_wrong(void)
{
    struct rig rig;
    lh_test_name("what was announced may stay unused, and what was not is read when it is used; "
                 "neither is remembered");
    rig_begin(&rig, "announce-wrong", 0);
    evaluate(&rig, NULL, 0, false);
    evaluate(&rig, (const uint32_t[]){2, 4}, 2, false);
    LH_CHECK(load_count(&rig, 2) == 1 && load_count(&rig, 3) == 0 && load_count(&rig, 4) == 1);
    LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
    lh_engine_announce(rig.engine, (const uint32_t[]){4, 3}, 2);
    for (uint32_t i = 0; i < 2; i++)
        use(&rig, i);
    use(&rig, 5);
    rig_settle(&rig);
    uint32_t loads[] = {load_count(&rig, 3), load_count(&rig, 4)};
    uint64_t replans = rig.engine->stats[LH_STATS_OF_EVALUATIONS].replans;
    evaluate(&rig, NULL, 0, false);
    LH_CHECK(load_count(&rig, 3) == loads[0] && load_count(&rig, 4) == loads[1]);
    LH_CHECK(rig.engine->stats[LH_STATS_OF_EVALUATIONS].replans == replans);
    rig_finish(&rig);
}

static uint64_t predicted_begins(const struct rig *rig, uint32_t unit)
{
    const struct lh_region *region = rig->engine->uses;
    uint64_t count = 0;
    for (uint64_t i = region->position; i < region->predicted.count; i++)
        count += region->predicted.events[i].unit == unit &&
                 region->predicted.events[i].kind == LH_RESIDENCY_EVENT_BEGIN;
    return count;
}

static void test_update(void)
{
    struct rig rig;
    lh_test_name("an update that comes after an announcement, and was recorded after other uses, "
                 "does not discard what was announced");
    rig_begin(&rig, "announce-update", 0);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_over_as_planned(&rig);
    LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_TRAIN) == 0);
    rig_settle(&rig);
    lh_engine_announce(rig.engine, (const uint32_t[]){3, 4}, 2);
    rig_settle(&rig);
    LH_CHECK(lh_expect_is_next(rig.engine));
    LH_CHECK(predicted_begins(&rig, 3) == 1 && predicted_begins(&rig, 4) == 1);
    lh_region_event(rig.engine, 1, LH_RESIDENCY_EVENT_UPDATE);
    LH_CHECK(lh_expect_is_next(rig.engine));
    LH_CHECK(predicted_begins(&rig, 3) == 1 && predicted_begins(&rig, 4) == 1);
    lh_region_event(rig.engine, 0, LH_RESIDENCY_EVENT_BEGIN);
    LH_CHECK(!lh_expect_is_next(rig.engine));
    LH_CHECK(predicted_begins(&rig, 3) == 0 && predicted_begins(&rig, 4) == 0);
    LH_CHECK(rig_abort(&rig) == 0);
    rig_finish(&rig);
}

static void test_full(void)
{
    struct rig rig;
    lh_test_name("announcements that do not fit the list of events are served when they are used");
    rig_begin(&rig, "announce-full", 0);
    LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
    for (uint64_t i = 0; i < rig.engine->event_max; i++) {
        lh_engine_announce(rig.engine, &marked[i % LH_COUNT_OF(marked)], 1);
        if (i % 16 == 0)
            rig_settle(&rig);
    }
    rig_settle(&rig);
    LH_CHECK(rig.engine->uses->predicted.count <= rig.engine->event_max);
    LH_CHECK(rig.engine->uses->predicted.count + 2 > rig.engine->event_max);
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        use(&rig, i);
    rig_settle(&rig);
    rig_finish(&rig);
}

/* Train steps whose forward announces right or wrong uses, and check every bit and every byte. */
static void train(uint64_t first_seed)
{
    struct rig rig;
    uint64_t seed = first_seed;
    rig_begin(&rig, "announce-train", lh_test_random(&seed) % 200000);
    for (int step = 0; step < 5; step++) {
        LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_TRAIN) == 0);
        for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
            uint32_t some[] = {marked[lh_test_random(&seed) % 3],
                               marked[lh_test_random(&seed) % 3]};
            if (i == 2 && lh_test_random(&seed) % 2)
                lh_engine_announce(rig.engine, marked, LH_COUNT_OF(marked));
            else if (lh_test_random(&seed) % 3 == 0)
                lh_engine_announce(rig.engine, some, 1 + (uint32_t)(lh_test_random(&seed) % 2));
            LH_CHECK(rig_acquire(&rig, i) == 0);
            lh_engine_handle_add(rig.engine, i);
            lh_engine_unpin(rig.engine, i);
        }
        if (lh_test_random(&seed) % 2)
            lh_engine_announce(rig.engine, (const uint32_t[]){4, 3, 2}, 3);
        unsigned gradients = (unsigned)lh_test_random(&seed) & RIG_GRADIENTS_ALL;
        LH_CHECK(rig_backward(&rig, gradients) == 0);
        LH_CHECK(rig_close(&rig, gradients) == 0);
        rig_over_as_planned(&rig);
    }
    rig_finish(&rig);
}

int main(void)
{
    test_prefetch();
    test_wrong();
    test_update();
    test_full();
    for (uint64_t seed = 0; seed < 12; seed++) {
        lh_test_name("steps with announcements, right and wrong, move the bytes of their plans and "
                     "have the bits of memory, seed %d",
                     (int)seed);
        train(seed);
    }
    return 0;
}
