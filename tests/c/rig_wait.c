#include "rig_wait.h"

#include "lh_test.h"
#include "sched/engine_private.h"

#define SLICE_MS 50
/* Rounds after which a manual engine, which nothing else moves, will never do what is awaited. */
#define MANUAL_ROUND_COUNT_MAX 8
#define POLL_COUNT_MAX 2000000

static _Thread_local uint64_t wait_until_ns;
static _Thread_local uint32_t wait_rounds;

void rig_wait_begin(struct rig *rig)
{
    wait_until_ns = lh_clock_now_ns(&rig->clock) + RIG_WAIT_S * UINT64_C(1000000000);
    wait_rounds = 0;
}

bool rig_waits(struct rig *rig, int rc)
{
    LH_CHECK(rc != 0 || lh_clock_now_ns(&rig->clock) < wait_until_ns);
    if (rc != 0 || !rig->opts.manual)
        return rc == 0;
    LH_CHECK(++wait_rounds <= MANUAL_ROUND_COUNT_MAX);
    rig_settle(rig);
    return true;
}

int rig_slice_ms(const struct rig *rig)
{
    return rig->opts.manual ? 0 : SLICE_MS;
}

bool rig_poll(struct rig *rig)
{
    bool moved = lh_engine_poll(rig->engine);
    if (rig->watch)
        rig->watch(rig);
    return moved;
}

void rig_settle(struct rig *rig)
{
    uint32_t count = 0;
    while (rig_poll(rig))
        LH_CHECK(++count < POLL_COUNT_MAX);
}

void rig_stop(struct rig *rig)
{
    rig->holds = (struct rig_holds){0};
    rig->watch = NULL;
    if (!rig->opts.manual)
        return;
    atomic_store(&rig->engine->failed, true);
    rig_settle(rig);
}

int rig_flush(struct rig *rig, bool commit)
{
    int rc = 0;
    rig_wait_begin(rig);
    do {
        rc = lh_engine_flush(rig->engine, commit, rig_slice_ms(rig));
    } while (rig_waits(rig, rc));
    return rc < 0 ? rc : 0;
}

int rig_abort(struct rig *rig)
{
    int rc = 0;
    rig_wait_begin(rig);
    do {
        rc = lh_engine_abort(rig->engine, rig_slice_ms(rig));
    } while (rig_waits(rig, rc));
    return rc < 0 ? rc : 0;
}

struct lh_engine_step_stats rig_over(struct rig *rig)
{
    struct lh_engine_step_stats stats;
    int rc = 0;
    rig_wait_begin(rig);
    do {
        rc = lh_engine_over_wait(rig->engine, rig_slice_ms(rig));
    } while (rig_waits(rig, rc));
    LH_CHECK(rc == 1 && lh_engine_stats(rig->engine, &stats) && stats.step == rig->step);
    return stats;
}

struct lh_engine_step_stats rig_over_as_planned(struct rig *rig)
{
    struct lh_engine_step_stats stats = rig_over(rig);
    for (int i = 0; i < LH_ENGINE_LINK_COUNT; i++) {
        if (stats.bytes[i] != stats.planned_bytes[i])
            fprintf(stderr, "step %" PRIu64 ", link %d: %" PRIu64 " bytes, planned %" PRIu64 "\n",
                    stats.step, i, stats.bytes[i], stats.planned_bytes[i]);
        LH_CHECK(stats.bytes[i] == stats.planned_bytes[i]);
    }
    return stats;
}

void rig_pause(struct rig *rig)
{
    int rc = 0;
    rig_wait_begin(rig);
    do {
        rc = lh_engine_pause(rig->engine, SLICE_MS);
    } while (rig_waits(rig, rc));
    LH_CHECK(rc == 1);
}

void rig_finish(struct rig *rig)
{
    uint64_t step = rig->step;
    LH_CHECK(rig_flush(rig, true) == 0);
    rig_shut(rig);
    rig_reopen(rig);
    LH_CHECK(rig->step == step);
    rig_unmake(rig);
}

void rig_hypers_set(struct rig *rig)
{
    for (uint32_t i = 0; i < RIG_GROUP_COUNT; i++)
        lh_engine_hyper_set(rig->engine, i, &rig->hypers[i]);
}

void rig_handles_drop(struct rig *rig)
{
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        while (lh_engine_handle_count(rig->engine, i) > 0)
            lh_engine_handle_drop(rig->engine, i);
    }
}
