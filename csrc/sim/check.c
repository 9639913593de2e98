#include "sim/check.h"

#include <inttypes.h>
#include <stdio.h>

#include "sched/engine_private.h"

#define NOWHERE UINT64_MAX

int lh_sim_check_init(struct lh_sim_check *check, struct lh_sim_world *world,
                      const struct lh_sim_model *model, struct lh_engine *engine, struct lh_io *io,
                      struct lh_error *err)
{
    *check = (struct lh_sim_check){.world = world,
                                   .model = model,
                                   .engine = engine,
                                   .io = io,
                                   .step = lh_engine_step(engine),
                                   .end_ns = world->now_ns};
    check->places = lh_alloc_zeroed(world->alloc, model->unit_count, sizeof(*check->places));
    if (!check->places)
        return lh_error_set(err, -ENOMEM, "no memory for the places of %" PRIu32 " units",
                            model->unit_count);
    for (uint32_t i = 0; i < model->unit_count; i++)
        check->places[i] = NOWHERE;
    return 0;
}

void lh_sim_check_deinit(struct lh_sim_check *check)
{
    if (check->world)
        lh_free(check->world->alloc, check->places);
    check->places = NULL;
}

/* Invariant 1, for the units that came or went. */
static void places_check(struct lh_sim_check *check)
{
    const struct lh_engine *engine = check->engine;
    bool is_new = false;
    for (uint32_t i = 0; i < check->model->unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        uint64_t place = unit->state == LH_UNIT_STATE_ABSENT ? NOWHERE : unit->offset;
        is_new |= place != check->places[i] && place != NOWHERE;
        check->places[i] = place;
        if (place != NOWHERE && place + unit->desc.bytes > engine->budget.region_bytes)
            lh_sim_world_fail(check->world, "unit %" PRIu32 " lies outside of the region", i);
    }
    for (uint32_t i = 0; is_new && i < check->model->unit_count; i++) {
        uint64_t end = check->places[i] + engine->units[i].desc.bytes;
        for (uint32_t j = 0; check->places[i] != NOWHERE && j < check->model->unit_count; j++) {
            if (j != i && check->places[j] != NOWHERE && check->places[j] >= check->places[i] &&
                check->places[j] < end)
                lh_sim_world_fail(check->world,
                                  "units %" PRIu32 " and %" PRIu32 " both lie at offset %" PRIu64,
                                  i, j, check->places[j]);
        }
    }
}

/* A chunk waits for the others of its unit as if it were computed as long as they are. */
static enum lh_chunk_state what_moves(const struct lh_chunk *chunk)
{
    return chunk->state == LH_CHUNK_STATE_COMPUTED ? LH_CHUNK_STATE_COMPUTING : chunk->state;
}

/* Invariant 6. */
static void naive_check(struct lh_sim_check *check)
{
    const struct lh_engine *engine = check->engine;
    const struct lh_chunk *first = NULL;
    for (uint32_t i = 0; i < engine->budget.slab_count; i++) {
        if (engine->slabs[i].chunk == LH_CHUNK_NONE)
            continue;
        const struct lh_chunk *chunk = &engine->chunks[engine->slabs[i].chunk];
        if (chunk->state == LH_CHUNK_STATE_LOADED)
            continue;
        first = first ? first : chunk;
        if (chunk->unit != first->unit || what_moves(chunk) != what_moves(first))
            lh_sim_world_fail(check->world,
                              "chunks of units %" PRIu32 " and %" PRIu32
                              " move at once, in states %d and %d",
                              first->unit, chunk->unit, (int)first->state, (int)chunk->state);
    }
}

/* Invariant 7. */
static void split_check(struct lh_sim_check *check)
{
    const struct lh_engine *engine = check->engine;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < check->model->unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        if (unit->is_deferred && unit->gradient_count > 0 && !unit->update_is_queued)
            bytes += unit->desc.bytes;
    }
    if (bytes > engine->budget.gradient_waiting_bytes)
        lh_sim_world_fail(check->world,
                          "%" PRIu64 " bytes of gradients wait, and %" PRIu64 " have room", bytes,
                          engine->budget.gradient_waiting_bytes);
}

static void step_over_check(struct lh_sim_check *check)
{
    struct lh_engine_step_stats stats;
    uint64_t bytes = 0;
    if (!lh_engine_stats(check->engine, &stats) || stats.step == check->step)
        return;
    if (stats.step != check->step + 1)
        lh_sim_world_fail(check->world, "step %" PRIu64 " is over after step %" PRIu64, stats.step,
                          check->step);
    for (uint32_t i = 0; i < LH_ENGINE_LINK_COUNT; i++) {
        if (stats.bytes[i] != stats.planned_bytes[i])
            lh_sim_world_fail(check->world,
                              "step %" PRIu64 ", link %" PRIu32 ": %" PRIu64
                              " bytes moved, %" PRIu64 " were planned",
                              stats.step, i, stats.bytes[i], stats.planned_bytes[i]);
        check->bytes[i] += stats.bytes[i];
        bytes += stats.bytes[i];
    }
    lh_sim_world_trace(check->world, LH_SIM_TRACE_STEP, stats.step, stats.end_ns - check->end_ns,
                       bytes);
    check->step = stats.step;
    check->end_ns = stats.end_ns;
    check->last[stats.step % LH_SIM_STEP_COUNT_MAX] = stats;
}

void lh_sim_check_quiet(struct lh_sim_check *check)
{
    const struct lh_engine *engine = check->engine;
    places_check(check);
    if (engine->opts.schedule == LH_ENGINE_SCHEDULE_NAIVE)
        naive_check(check);
    if (engine->opts.schedule == LH_ENGINE_SCHEDULE_AUTO)
        split_check(check);
    step_over_check(check);
    if (engine->io_in_flight != check->io->in_flight_count)
        lh_sim_world_fail(check->world,
                          "the engine counts %" PRIu32 " requests in flight, the backend %" PRIu32,
                          engine->io_in_flight, check->io->in_flight_count);
    if (engine->committed_step > engine->step)
        lh_sim_world_fail(check->world, "step %" PRIu64 " is committed, %" PRIu64 " is closed",
                          engine->committed_step, engine->step);
    check->has_flush_commits |= engine->commit_is_of_flush;
}

void lh_sim_check_totals(struct lh_sim_check *check)
{
    const struct lh_engine *engine = check->engine;
    const struct lh_sim_io_stats *stats = lh_sim_io_stats(check->io);
    uint64_t moved = stats->bytes[LH_SIM_DIRECTION_READ] + stats->bytes[LH_SIM_DIRECTION_WRITE];
    uint64_t counted = 0;
    /* What belongs to steps that are over, to those that are open, and to none. */
    for (uint32_t i = 0; i < LH_ENGINE_LINK_COPY_IN; i++)
        counted += check->bytes[i] + engine->stats[0].bytes[i] + engine->stats[1].bytes[i] +
                   engine->stats_other.bytes[i];
    if (counted != moved && !check->has_flush_commits)
        lh_sim_world_fail(check->world,
                          "the links moved %" PRIu64 " bytes, the engine counts %" PRIu64, moved,
                          counted);
}

void lh_sim_check_hangs(struct lh_sim_check *check, const struct lh_sim_train *train)
{
    const struct lh_engine *engine = check->engine;
    char units[256] = "";
    uint64_t used = 0;
    for (uint32_t i = 0; i < check->model->unit_count && used + 24 < sizeof(units); i++) {
        const struct lh_unit *unit = &engine->units[i];
        int count = snprintf(units + used, sizeof(units) - used, " %" PRIu32 ":%d/%" PRIu32 "%s%s",
                             i, (int)unit->state, lh_unit_pins(unit),
                             unit->waiter_count > 0 ? "w" : "", unit->update_is_queued ? "u" : "");
        used += (uint64_t)count;
    }
    lh_sim_world_fail(check->world,
                      "nothing moves and nothing is to come: training is in state %d of block "
                      "%" PRIu32 ", phase %d, step %" PRIu64 "; the engine is in state %d, units "
                      "(index:state/pins, w waited for, u to be updated):%s",
                      (int)train->state, train->block, (int)train->phase, train->step,
                      (int)engine->step_state, units);
}
