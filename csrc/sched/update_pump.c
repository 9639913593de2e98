#include "sched/update_pump.h"

#include "sched/engine_private.h"

#define JOBS_PER_WORKER 2

bool lh_update_pump_fetch(struct lh_engine *engine, struct lh_chunk *chunk,
                          struct lh_update_pump *pump)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    uint32_t slab = LH_CHUNK_NONE;
    LH_ASSERT(chunk->state == LH_CHUNK_STATE_IDLE);
    LH_ASSERT(!chunk->is_kept || chunk->kept_slab < engine->budget.kept_chunk_count);
    if (chunk->is_kept)
        slab = chunk->kept_slab;
    else if (!pump->is_full || unit->state == LH_UNIT_STATE_UPDATING)
        slab = lh_slab_find(engine, unit);
    if (slab == LH_CHUNK_NONE) {
        pump->is_full |= unit->update.is_queued;
        return false;
    }
    lh_chunk_read(engine, chunk, slab);
    pump->moved = true;
    return true;
}

uint32_t lh_update_pump_next(struct lh_engine *engine, struct lh_unit *unit)
{
    uint64_t step = lh_core_step(engine);
    while (unit->update.chunk_next < unit->chunk_count &&
           engine->chunks[unit->chunk_first + unit->update.chunk_next].computed_step == step)
        unit->update.chunk_next++;
    return unit->update.chunk_next;
}

/*
 * Whether there are JOBS_PER_WORKER jobs for every worker: a current job and the next one. Then
 * chunks that keep their slabs are not computed, so that chunks that will free their slabs never
 * wait for all of them while the SSDs are idle.
 */
static bool workers_are_full(const struct lh_engine *engine)
{
    return engine->jobs_in_flight >= JOBS_PER_WORKER * engine->exec->thread_count;
}

/* Whether the chunk is LOADED with all that its update needs, and its unit is UPDATING. */
static bool may_compute(struct lh_engine *engine, const struct lh_unit *unit,
                        struct lh_chunk *chunk, struct lh_update_pump *pump)
{
    if (chunk->state != LH_CHUNK_STATE_LOADED)
        return false;
    bool is_whole = LH_FEATURE_ALL(engine, chunk_is_whole, chunk);
    if (!is_whole) {
        pump->moved = true;
        return false;
    }
    bool may = LH_FEATURE_ALL(engine, chunk_may_compute, chunk);
    return may && unit->state == LH_UNIT_STATE_UPDATING;
}

/*
 * Compute the unit's chunks that are ready, and read further chunks as far as slabs are available.
 */
static void unit_pump(struct lh_engine *engine, struct lh_unit *unit, struct lh_update_pump *pump)
{
    const bool is_late = pump->is_urgent;
    bool may_fetch = pump->may_fetch;
    uint32_t pass_count = unit->update.chunks_to_pass;
    LH_ASSERT(pass_count <= unit->update.chunks_loaded);
    uint32_t keep_count = unit->update.chunks_loaded - pass_count;

    for (uint32_t i = lh_update_pump_next(engine, unit); i < unit->chunk_count; i++) {
        bool may_keep = !workers_are_full(engine) && keep_count > 0;
        if (!may_fetch && !may_keep && pass_count == 0)
            break;
        struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + i];
        if (chunk->computed_step == lh_core_step(engine))
            continue;
        if (chunk->state == LH_CHUNK_STATE_IDLE)
            may_fetch = may_fetch && lh_update_pump_fetch(engine, chunk, pump);
        else if (chunk->state == LH_CHUNK_STATE_LOADED && chunk->is_kept)
            keep_count--;
        else if (chunk->state == LH_CHUNK_STATE_LOADED)
            pass_count--;
        if (may_compute(engine, unit, chunk, pump) && !is_late && (!chunk->is_kept || may_keep)) {
            lh_chunk_compute(engine, chunk);
            pump->moved = true;
        }
    }
    pump->is_urgent |= unit->waiter_count > 0 && workers_are_full(engine) &&
                       unit->update.chunks_loaded > unit->update.chunks_to_pass;
    /* A unit that waits for a slab has precedence: later units only compute, and free slabs. */
    if (!may_fetch && unit->state == LH_UNIT_STATE_UPDATING)
        pump->may_fetch = false;
}

/* Read chunks ahead, in the order of the last step's updates, into slabs that are free. */
static void ahead_pump(struct lh_engine *engine, struct lh_update_pump *pump)
{
    struct lh_updates *updates = &engine->updates;
    for (; updates->ahead_first < updates->predicted_count; updates->ahead_first++) {
        uint32_t index = updates->predicted[updates->ahead_first];
        struct lh_unit *unit = lh_engine_unit_at(engine, index);
        for (uint32_t i = 0; i < unit->chunk_count && !unit->update.is_queued; i++) {
            struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + i];
            if (chunk->state == LH_CHUNK_STATE_IDLE && !lh_update_pump_fetch(engine, chunk, pump))
                return;
        }
    }
}

bool lh_update_pump_take(struct lh_engine *engine, struct lh_unit *unit)
{
    bool is_here = unit->state == LH_UNIT_STATE_READY && !unit->update.is_flushing;
    LH_ASSERT(unit->update.is_queued);
    if (!is_here || unit->update.chunks_computed > 0 || !lh_unit_claim_host(engine, unit))
        return false;
    lh_unit_state_set(unit, LH_UNIT_STATE_UPDATING);
    LH_FEATURE_CALL(engine, update_started, unit);
    return true;
}

static void updates_pump(struct lh_engine *engine, struct lh_update_pump *pump)
{
    for (uint32_t i = engine->updates.first; i < engine->updates.count; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, engine->updates.queue[i]);
        bool may_start = LH_FEATURE_ALL(engine, update_may_start, unit);
        if (!may_start)
            continue;
        pump->moved |= lh_update_pump_take(engine, unit);
        unit_pump(engine, unit, pump);
    }
    bool may_read = LH_FEATURE_ALL(engine, ahead_may_read);
    if (engine->step_state == LH_STEP_STATE_OPEN && may_read)
        ahead_pump(engine, pump);
}

/* Skip units at the front of the queue that are computed. */
static void queue_advance(struct lh_engine *engine)
{
    LH_ASSERT(engine->updates.first <= engine->updates.count);
    while (engine->updates.first < engine->updates.count) {
        uint32_t first = engine->updates.queue[engine->updates.first];
        if (engine->units[first].update.chunks_computed < engine->units[first].chunk_count)
            break;
        engine->updates.first++;
    }
}

bool lh_update_pump(struct lh_engine *engine)
{
    struct lh_update_pump pump = {.may_fetch = true};
    if (engine->step_state != LH_STEP_STATE_OPEN && engine->step_state != LH_STEP_STATE_CLOSED)
        return false;
    pump.moved = LH_FEATURE_PUMP(engine, pump_gradients);
    if (engine->pump_updates)
        engine->pump_updates(engine, &pump);
    else
        updates_pump(engine, &pump);
    queue_advance(engine);
    return pump.moved;
}
