#include "sim/check.h"

#include <inttypes.h>
#include <stdio.h>

#include "sched/engine_private.h"
#include "sim/dev.h"

#define NOWHERE UINT64_MAX
#define REGION_COUNT 2 /* the regions of main memory and of the accelerator */

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
    for (uint32_t i = 0; i < REGION_COUNT; i++) {
        check->places[i] = lh_alloc_zeroed(world->alloc, model->unit_count, sizeof(uint64_t));
        if (!check->places[i]) {
            lh_sim_check_deinit(check);
            return lh_error_set(err, -ENOMEM, "no memory for the places of %" PRIu32 " units",
                                model->unit_count);
        }
        for (uint32_t j = 0; j < model->unit_count; j++)
            check->places[i][j] = NOWHERE;
    }
    return 0;
}

void lh_sim_check_deinit(struct lh_sim_check *check)
{
    for (uint32_t i = 0; check->world && i < REGION_COUNT; i++) {
        lh_free(check->world->alloc, check->places[i]);
        check->places[i] = NULL;
    }
}

static uint64_t place_of(const struct lh_unit *unit, bool is_device)
{
    if (is_device)
        return lh_unit_copy_is_placed(&unit->copy) ? unit->copy.offset : NOWHERE;
    return unit->state == LH_UNIT_STATE_ABSENT ? NOWHERE : unit->offset;
}

static uint64_t place_bytes(const struct lh_engine *engine, const struct lh_unit *unit,
                            bool is_device)
{
    return engine->dev && !is_device ? unit->desc->bytes : unit->desc->place_bytes;
}

/* Check invariant 1 for the units that were loaded or evicted. */
static void places_check(struct lh_sim_check *check, bool is_device)
{
    const struct lh_engine *engine = check->engine;
    const char *where = is_device ? "the accelerator's" : "main memory's";
    uint64_t bytes = is_device ? engine->opts.device_bytes : engine->budget.region_bytes;
    uint64_t *places = check->places[is_device];
    bool is_new = false;
    for (uint32_t i = 0; i < check->model->unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        uint64_t place = place_of(unit, is_device);
        is_new |= place != places[i] && place != NOWHERE;
        places[i] = place;
        if (place != NOWHERE && place + place_bytes(engine, unit, is_device) > bytes)
            lh_sim_world_fail(check->world, "unit %" PRIu32 " is outside of %s region", i, where);
    }
    for (uint32_t i = 0; is_new && i < check->model->unit_count; i++) {
        uint64_t end = places[i] + place_bytes(engine, &engine->units[i], is_device);
        for (uint32_t j = 0; places[i] != NOWHERE && j < check->model->unit_count; j++) {
            if (j != i && places[j] != NOWHERE && places[j] >= places[i] && places[j] < end)
                lh_sim_world_fail(check->world,
                                  "units %" PRIu32 " and %" PRIu32 " overlap at offset %" PRIu64
                                  " of %s region",
                                  i, j, places[j], where);
        }
    }
}

/* The state of a chunk, where a computed chunk that waits for other chunks counts as computing. */
static enum lh_chunk_state what_moves(const struct lh_chunk *chunk)
{
    return chunk->state == LH_CHUNK_STATE_COMPUTED ? LH_CHUNK_STATE_COMPUTING : chunk->state;
}

/* Check invariant 6. */
static void naive_check(struct lh_sim_check *check)
{
    const struct lh_engine *engine = check->engine;
    const struct lh_chunk *first = NULL;
    for (uint32_t i = 0; i < engine->budget.slab_count; i++) {
        if (engine->slabs[i].chunk == LH_CHUNK_NONE)
            continue;
        const struct lh_chunk *chunk = &engine->chunks[engine->slabs[i].chunk];
        if (chunk->state == LH_CHUNK_STATE_LOADED || chunk->is_flushing)
            continue;
        first = first ? first : chunk;
        if (chunk->unit != first->unit || what_moves(chunk) != what_moves(first))
            lh_sim_world_fail(check->world,
                              "chunks of units %" PRIu32 " and %" PRIu32
                              " move at the same time, in states %d and %d",
                              first->unit, chunk->unit, (int)first->state, (int)chunk->state);
    }
}

/* Check invariant 7. */
static void split_check(struct lh_sim_check *check)
{
    const struct lh_engine *engine = check->engine;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < check->model->unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        if (unit->parts->defer.is_deferred && unit->update.gradient_count > 0 &&
            !unit->update.is_queued)
            bytes += lh_landing_waiting_bytes(engine, unit);
    }
    if (bytes > engine->budget.gradient_waiting_bytes)
        lh_sim_world_fail(check->world,
                          "%" PRIu64 " bytes of gradients wait, but only %" PRIu64 " have room",
                          bytes, engine->budget.gradient_waiting_bytes);
}

static void step_over_check(struct lh_sim_check *check)
{
    struct lh_engine_step_stats stats;
    uint64_t bytes = 0;
    if (!lh_engine_stats(check->engine, &stats) || stats.step == check->step)
        return;
    if (stats.step != check->step + 1)
        lh_sim_world_fail(check->world, "step %" PRIu64 " ended directly after step %" PRIu64,
                          stats.step, check->step);
    for (uint32_t i = 0; i < LH_ENGINE_LINK_COUNT; i++) {
        if (stats.bytes[i] != stats.planned_bytes[i])
            lh_sim_world_fail(check->world,
                              "step %" PRIu64 ", link %" PRIu32 ": %" PRIu64
                              " bytes were moved, but %" PRIu64 " were planned",
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
    places_check(check, false);
    if (engine->dev)
        places_check(check, true);
    if (engine->opts.schedule == LH_ENGINE_SCHEDULE_NAIVE)
        naive_check(check);
    if (engine->opts.schedule == LH_ENGINE_SCHEDULE_AUTO)
        split_check(check);
    step_over_check(check);
    if (engine->transfers.in_flight != check->io->in_flight_count)
        lh_sim_world_fail(check->world,
                          "the engine counts %" PRIu32
                          " requests in flight, but the backend counts %" PRIu32,
                          engine->transfers.in_flight, check->io->in_flight_count);
    if (engine->dev && lh_copy_in_flight(engine) != engine->dev->in_flight_count)
        lh_sim_world_fail(check->world,
                          "the engine counts %" PRIu32
                          " copies in flight, but the backend counts %" PRIu32,
                          lh_copy_in_flight(engine), engine->dev->in_flight_count);
    if (engine->committed_step > engine->step)
        lh_sim_world_fail(check->world,
                          "step %" PRIu64 " is committed, but only step %" PRIu64 " is closed",
                          engine->committed_step, engine->step);
    check->has_flush_commits |= engine->commit_is_of_flush;
}

/* The bytes over a link that belong to ended steps, to open steps, and to no step. */
static uint64_t link_bytes(const struct lh_sim_check *check, uint32_t link)
{
    const struct lh_engine *engine = check->engine;
    return check->bytes[link] + engine->stats[0].bytes[link] + engine->stats[1].bytes[link] +
           engine->stats[LH_STATS_OF_EVALUATIONS].bytes[link];
}

static void total_check(struct lh_sim_check *check, const char *what, uint64_t moved,
                        uint64_t counted)
{
    if (counted != moved)
        lh_sim_world_fail(check->world,
                          "the %s moved %" PRIu64 " bytes, but the engine counted %" PRIu64, what,
                          moved, counted);
}

void lh_sim_check_totals(struct lh_sim_check *check)
{
    struct lh_dev *dev = check->engine->dev;
    const struct lh_sim_io_stats *stats = lh_sim_io_stats(check->io);
    uint64_t moved = stats->bytes[LH_SIM_DIRECTION_READ] + stats->bytes[LH_SIM_DIRECTION_WRITE];
    uint64_t counted = 0;
    for (uint32_t i = 0; i < LH_ENGINE_LINK_COUNT; i++)
        counted += lh_engine_link_is_ssd((enum lh_engine_link)i) ? link_bytes(check, i) : 0;
    if (!check->has_flush_commits)
        total_check(check, "SSDs", moved, counted);
    if (!dev)
        return;
    if (dev->in_flight_count > 0)
        lh_sim_world_fail(check->world, "%" PRIu32 " copies have not completed",
                          dev->in_flight_count);
    const uint64_t *copied = lh_sim_dev_stats(dev)->bytes;
    total_check(check, "copies in", copied[LH_DEV_DIRECTION_IN],
                link_bytes(check, LH_ENGINE_LINK_COPY_IN) +
                    link_bytes(check, LH_ENGINE_LINK_SAVED_IN));
    total_check(check, "copies out", copied[LH_DEV_DIRECTION_OUT],
                link_bytes(check, LH_ENGINE_LINK_COPY_OUT) +
                    link_bytes(check, LH_ENGINE_LINK_SAVED_OUT));
}

void lh_sim_check_hangs(struct lh_sim_check *check, const struct lh_sim_train *train)
{
    const struct lh_engine *engine = check->engine;
    char units[256] = "";
    uint64_t used = 0;
    for (uint32_t i = 0; i < check->model->unit_count && used + 24 < sizeof(units); i++) {
        const struct lh_unit *unit = &engine->units[i];
        int count =
            snprintf(units + used, sizeof(units) - used, " %" PRIu32 ":%d+%d/%" PRIu32 "%s%s", i,
                     (int)unit->state, (int)unit->copy.state, lh_unit_pins(unit),
                     unit->waiter_count > 0 ? "w" : "", unit->update.is_queued ? "u" : "");
        used += (uint64_t)count;
    }
    lh_sim_world_fail(check->world,
                      "hang: nothing moves and no event is pending: training is in state %d of "
                      "block %" PRIu32 ", phase %d, step %" PRIu64 "; the engine is in state %d, "
                      "units (index:state+copy/pins, w waited for, u to be updated):%s",
                      (int)train->state, train->block, (int)train->phase, train->step,
                      (int)engine->step_state, units);
}
