/*
 * Test units of matrices (sched/orthogonal.h): the bits of the definition of Muon, whatever the
 * schedule, the memory and the device, and that one unit at a time has the slabs and the buffers.
 */
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

/* fp32 with two matrices, fp16, and the large bf16 unit with several chunks. */
#define MATRICES (1u << 1 | 1u << 3 | 1u << 5)

static const struct rig_opts opts_matrices = {.in_memory = true,
                                              .large = true,
                                              .commit_every = 1,
                                              .plain_gradients = true,
                                              .matrices = MATRICES};

static void test_values(struct rig_opts opts, const char *what)
{
    /* All; a unit of matrices alone; one of two matrices; none; all again. */
    static const unsigned gradients[] = {RIG_GRADIENTS_ALL, 0x80, 0x44, 0x43, RIG_GRADIENTS_ALL};
    struct rig rig;

    lh_test_name("every forward and backward sees the bits of Muon's definition, and the disk has "
                 "them too: %s",
                 what);
    rig_make(&rig, "matrices-values", opts);
    for (size_t i = 0; i < LH_COUNT_OF(gradients); i++) {
        LH_CHECK(rig_step(&rig, gradients[i]) == 0);
        if (opts.given == 0)
            rig_over_as_planned(&rig);
    }
    rig_finish(&rig);
}

static void test_schedules(void)
{
    static const char *const names[] = {"optimized", "serial", "naive", "deferred", "auto"};

    for (unsigned i = 0; i < 2 * LH_ENGINE_SCHEDULE_COUNT; i++) {
        struct rig_opts opts = opts_matrices;

        opts.schedule = (enum lh_engine_schedule)(i / 2);
        opts.least_memory = i % 2;
        opts.large = i % 2;
        opts.manual = i % 4 < 2;
        opts.device = i % 3 == 2 ? "emu" : NULL;
        opts.device_bytes = 6 << 20;
        test_values(opts, names[i / 2]);
    }
}

static void test_others(void)
{
    struct rig_opts opts = opts_matrices;

    opts.commit_every = 3;
    test_values(opts, "with dirty units in memory");
    opts.commit_every = 1;
    opts.schedule = LH_ENGINE_SCHEDULE_SERIAL;
    opts.given = 1u << 3 | 1u << 5;
    test_values(opts, "with matrices whose states another process has");
}

/* What test_one_at_a_time() has seen. */
struct seen {
    uint32_t running; /* rounds in which a unit's matrices are worked on */
    uint32_t held;    /* ... while another unit's update waits for that */
};

static void look(struct rig *rig)
{
    const struct lh_orthogonal *orthogonal = rig->engine->orthogonal;
    struct seen *seen = rig->watch_context;
    uint32_t running = 0;

    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        const struct lh_unit *unit = &rig->engine->units[i];
        bool is_matrices = MATRICES & (1u << i);
        bool is_running = unit->parts->orthogonal.state == LH_ORTHOGONAL_STATE_RUNNING;

        LH_CHECK((unit->update.turn == LH_UPDATE_TURN_WAITS) ==
                 (orthogonal->unit && orthogonal->unit != unit && is_matrices));
        LH_CHECK(!is_running || orthogonal->unit == unit);
        for (uint32_t j = 0; is_running && j < unit->chunk_count; j++)
            LH_CHECK(rig->engine->chunks[unit->chunk_first + j].state == LH_CHUNK_STATE_LOADED);
        running += is_running;
        seen->held +=
            orthogonal->unit && unit->update.turn == LH_UPDATE_TURN_WAITS && unit->update.is_queued;
    }
    LH_CHECK(running <= 1);
    seen->running += running;
}

static void test_one_at_a_time(void)
{
    struct seen seen = {0};
    struct rig_opts opts = opts_matrices;
    struct rig rig;

    lh_test_name("one unit of matrices at a time is updated, and its chunks stay as they were read "
                 "until all of its matrices are worked on");
    opts.manual = true;
    opts.schedule = LH_ENGINE_SCHEDULE_SERIAL;
    rig_make(&rig, "matrices-turns", opts);
    rig.watch = look;
    rig.watch_context = &seen;
    for (int i = 0; i < 3; i++) {
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_over_as_planned(&rig);
    }
    LH_CHECK(seen.running > 0 && seen.held > 0);
    rig.watch = NULL;
    rig_finish(&rig);
}

static void test_abort(void)
{
    struct rig rig;
    struct rig_opts opts = opts_matrices;

    lh_test_name("an aborted step leaves no trace, however far its matrices had come");
    opts.least_memory = true;
    rig_make(&rig, "matrices-abort", opts);
    for (int i = 0; i < 4; i++) {
        LH_CHECK(rig_forward_backward(&rig, i % 2 ? 0x80 : RIG_GRADIENTS_ALL) == 0);
        if (i > 1)
            LH_CHECK(rig_flush(&rig, false) == 0);
        LH_CHECK(rig_abort(&rig) == 0);
        LH_CHECK(!rig.engine->orthogonal->unit && lh_engine_step(rig.engine) == rig.step);
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    }
    rig_finish(&rig);
}

static void test_without(void)
{
    lh_test_name("an engine without matrices has no buffers for them");
    for (unsigned i = 0; i < 2; i++) {
        struct rig_opts opts = opts_matrices;
        struct rig rig;

        opts.matrices = i == 0 ? 0 : 1u << 1;
        rig_make(&rig, "matrices-none", opts);
        LH_CHECK((rig.engine->orthogonal != NULL) == (i > 0));
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_finish(&rig);
    }
}

int main(void)
{
    test_schedules();
    test_others();
    test_one_at_a_time();
    test_abort();
    test_without();
    return 0;
}
