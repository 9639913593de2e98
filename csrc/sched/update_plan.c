#include "sched/update_plan.h"

#include "sched/engine_private.h"

/* The bytes that reading a chunk moves. Arrays never written are not read, unless is_written. */
static uint64_t chunk_bytes(const struct lh_engine *engine, const struct lh_chunk *chunk,
                            bool is_written)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    uint32_t slot = lh_store_read_slot(engine->store, unit->desc->store_group);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++) {
        struct lh_unit_state_place place = lh_unit_state_place(unit, i, chunk->first, chunk->count);
        if (place.bytes > 0 && (is_written || !lh_store_is_zero(engine->store, place.extent, slot)))
            bytes += place.bytes;
    }
    return bytes;
}

/*
 * The bytes that step, which updates the chunk, still has to read for it. If the previous step is
 * not over but updates the chunk, too, that update will leave the chunk in its slab if the chunk
 * keeps one, otherwise only on SSD.
 */
static uint64_t chunk_left_bytes(const struct lh_engine *engine, const struct lh_chunk *chunk,
                                 uint64_t step)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    if (step > lh_core_step(engine) && unit->update.gradient_count > 0)
        return chunk->is_kept ? 0 : chunk_bytes(engine, chunk, true);
    if (chunk->state != LH_CHUNK_STATE_IDLE || chunk->computed_step == step)
        return 0;
    return chunk_bytes(engine, chunk, false);
}

static uint64_t chunk_read_bytes(const struct lh_chunk *chunk, uint64_t step)
{
    return chunk->read_step == step ? chunk->read_bytes : 0;
}

/* Add the reads and writes of states and parameters by a unit's update to step's plan. */
static void unit_plan_bytes(struct lh_engine *engine, const struct lh_unit *unit, uint64_t step)
{
    struct lh_engine_step_stats *stats = lh_core_stats(engine, step);
    for (uint32_t i = 0; i < unit->chunk_count; i++) {
        struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + i];
        stats->planned_bytes[LH_ENGINE_LINK_STATE_WRITE] +=
            lh_write_back_state_bytes(engine, chunk, step);
        stats->planned_bytes[LH_ENGINE_LINK_PARAM_WRITE] +=
            lh_write_back_param_bytes(engine, chunk, step);
        uint64_t bytes = chunk_read_bytes(chunk, step) + chunk_left_bytes(engine, chunk, step);
        chunk->planned_steps[step % 2] = step;
        chunk->planned_bytes[step % 2] = bytes;
        stats->planned_bytes[LH_ENGINE_LINK_STATE_READ] += bytes;
    }
}

/* Add all that a unit's update moves to step's plan. */
static void unit_plan(struct lh_engine *engine, struct lh_unit *unit, uint64_t step)
{
    unit->update.planned_step = step;
    LH_FEATURE_CALL(engine, planned, unit, step);
    unit_plan_bytes(engine, unit, step);
}

void lh_update_plan_settled(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(engine->step_state == LH_STEP_STATE_CLOSED && unit->update.gradient_count > 0);
    unit_plan_bytes(engine, unit, engine->step);
}

/* Remove from step's plan a unit that is not updated after all, except what was already read. */
static void unit_unplan(struct lh_engine *engine, struct lh_unit *unit, uint64_t step)
{
    struct lh_engine_step_stats *stats = lh_core_stats(engine, step);
    for (uint32_t i = 0; i < unit->chunk_count; i++) {
        struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + i];
        stats->planned_bytes[LH_ENGINE_LINK_STATE_WRITE] -=
            lh_write_back_state_bytes(engine, chunk, step);
        stats->planned_bytes[LH_ENGINE_LINK_PARAM_WRITE] -=
            lh_write_back_param_bytes(engine, chunk, step);
        uint64_t bytes = chunk_read_bytes(chunk, step);
        LH_ASSERT(chunk->planned_bytes[step % 2] >= bytes);
        stats->planned_bytes[LH_ENGINE_LINK_STATE_READ] -= chunk->planned_bytes[step % 2] - bytes;
        chunk->planned_bytes[step % 2] = bytes;
    }
}

void lh_update_plan_begin(struct lh_engine *engine)
{
    struct lh_engine_step_stats *stats = lh_core_stats(engine, engine->plan_step);
    LH_ASSERT(engine->mode == LH_ENGINE_MODE_TRAIN && engine->plan_step > 0);
    bool is_closing =
        engine->plan_step > lh_core_step(engine) && !atomic_load(&engine->is_reopened);
    stats->planned_bytes[LH_ENGINE_LINK_STATE_READ] = 0;
    stats->planned_bytes[LH_ENGINE_LINK_STATE_WRITE] = 0;
    stats->planned_bytes[LH_ENGINE_LINK_PARAM_WRITE] = 0;
    stats->planned_bytes[LH_ENGINE_LINK_GRADIENT_WRITE] = 0;
    stats->planned_bytes[LH_ENGINE_LINK_GRADIENT_READ] = 0;
    stats->planned_bytes[LH_ENGINE_LINK_COPY_OUT] = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        if (is_closing)
            unit->update.is_predicted =
                unit->update.gradient_count > 0 && !unit->desc->is_announced;
        if (unit->update.is_predicted)
            unit_plan(engine, unit, engine->plan_step);
    }
}

/* Count chunks that were read ahead for an update that is not in this step's plan. */
static void unit_plan_reads(struct lh_engine *engine, struct lh_unit *unit, uint64_t step)
{
    for (uint32_t i = 0; i < unit->chunk_count; i++) {
        struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + i];
        if (chunk->planned_steps[step % 2] == step)
            continue;
        chunk->planned_steps[step % 2] = step;
        chunk->planned_bytes[step % 2] = chunk_read_bytes(chunk, step);
        lh_core_stats(engine, step)->planned_bytes[LH_ENGINE_LINK_STATE_READ] +=
            chunk->planned_bytes[step % 2];
    }
}

void lh_update_plan_correct(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        bool is_updated = unit->update.gradient_count > 0;
        bool is_planned = unit->update.planned_step == engine->step;
        if (is_updated != is_planned && !unit->desc->is_announced)
            lh_core_stats(engine, engine->step)->replans++;
        if (is_updated && !is_planned)
            unit_plan(engine, unit, engine->step);
        else if (is_planned && !is_updated)
            unit_unplan(engine, unit, engine->step);
        else if (!is_planned)
            unit_plan_reads(engine, unit, engine->step);
        LH_FEATURE_CALL(engine, plan_corrected, unit);
    }
}

void lh_update_plan_reread(struct lh_engine *engine, struct lh_chunk *chunk)
{
    uint64_t step = chunk->read_step;
    LH_ASSERT(step == lh_core_step(engine));
    uint64_t *planned = &chunk->planned_bytes[step % 2];
    if (chunk->planned_steps[step % 2] != step || chunk->read_bytes <= *planned)
        return;
    struct lh_engine_step_stats *stats = lh_core_stats(engine, step);
    stats->planned_bytes[LH_ENGINE_LINK_STATE_READ] += chunk->read_bytes - *planned;
    *planned = chunk->read_bytes;
}
