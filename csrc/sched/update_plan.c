/* What a step's updates will read and write, counted before they do. */
#include "sched/engine_private.h"

/* The extents of R, M and V, in a slab's order. */
uint32_t lh_state_extent(const struct lh_unit *unit, uint32_t array)
{
    const uint32_t extents[LH_STATE_ARRAY_COUNT] = {
        unit->desc.residual_extent, unit->desc.moment1_extent, unit->desc.moment2_extent};
    return extents[array];
}

uint64_t lh_state_element_bytes(const struct lh_unit *unit, uint32_t array)
{
    if (array > 0)
        return sizeof(float);
    return unit->desc.residual_extent == LH_ENGINE_EXTENT_NONE ? 0 : sizeof(int16_t);
}

/*
 * Bytes that reading a chunk moves: what was never written is not read, but the update of a closed
 * step that is not over yet makes zeros into something.
 */
static uint64_t chunk_read_bytes(const struct lh_engine *engine, const struct lh_chunk *chunk,
                                 bool is_being_written)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    uint32_t slot = lh_store_read_slot(engine->store, unit->desc.store_group);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++) {
        uint64_t element_bytes = lh_state_element_bytes(unit, i);
        if (element_bytes > 0 &&
            (is_being_written || !lh_store_is_zero(engine->store, lh_state_extent(unit, i), slot)))
            bytes += chunk->count * element_bytes;
    }
    return bytes;
}

/* The chunk is in memory and stays until its update in step; an earlier step has read it. */
static bool chunk_is_here(const struct lh_engine *engine, const struct lh_chunk *chunk,
                          uint64_t step)
{
    if (chunk->state == LH_CHUNK_STATE_IDLE || chunk->read_step == step)
        return false;
    bool is_waiting =
        chunk->state == LH_CHUNK_STATE_READING || chunk->state == LH_CHUNK_STATE_LOADED;
    return chunk->is_kept || (is_waiting && !engine->units[chunk->unit].update_is_queued);
}

/* Count the reads and writes of a unit's update into step's plan. */
static void unit_plan(struct lh_engine *engine, struct lh_unit *unit, uint64_t step)
{
    struct lh_engine_step_stats *stats = lh_step_stats(engine, step);
    stats->planned_bytes[LH_ENGINE_LINK_PARAM_WRITE] += unit->desc.bytes;
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++)
        stats->planned_bytes[LH_ENGINE_LINK_STATE_WRITE] +=
            unit->desc.elements * lh_state_element_bytes(unit, i);
    for (uint32_t i = 0; i < unit->chunk_count; i++) {
        struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + i];
        if (chunk_is_here(engine, chunk, step))
            continue;
        chunk->planned_step = step;
        bool is_being_written = step > engine->step && unit->update_is_queued;
        chunk->planned_bytes = chunk->read_step == step
                                   ? chunk->read_bytes
                                   : chunk_read_bytes(engine, chunk, is_being_written);
        stats->planned_bytes[LH_ENGINE_LINK_STATE_READ] += chunk->planned_bytes;
    }
}

/* What the step will read and write for its updates, as far as one knows at its begin. */
void lh_update_plan(struct lh_engine *engine)
{
    struct lh_engine_step_stats *stats = lh_step_stats(engine, engine->plan_step);
    bool is_closing = engine->step_state != LH_STEP_STATE_OPEN;
    stats->planned_bytes[LH_ENGINE_LINK_STATE_READ] = 0;
    stats->planned_bytes[LH_ENGINE_LINK_STATE_WRITE] = 0;
    stats->planned_bytes[LH_ENGINE_LINK_PARAM_WRITE] = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        if (is_closing)
            unit->is_predicted = unit->gradient_count > 0;
        if (unit->is_predicted)
            unit_plan(engine, unit, engine->plan_step);
    }
}

/* At close one knows which units have gradients: the plan is corrected where the last step
 * misled it. */
void lh_update_plan_correct(struct lh_engine *engine)
{
    struct lh_engine_step_stats *stats = lh_step_stats(engine, engine->step);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        bool is_updated = unit->gradient_count > 0;
        if (is_updated == unit->is_predicted)
            continue;
        stats->replans++;
        if (is_updated) {
            unit_plan(engine, unit, engine->step);
            continue;
        }
        stats->planned_bytes[LH_ENGINE_LINK_PARAM_WRITE] -= unit->desc.bytes;
        for (uint32_t j = 0; j < LH_STATE_ARRAY_COUNT; j++)
            stats->planned_bytes[LH_ENGINE_LINK_STATE_WRITE] -=
                unit->desc.elements * lh_state_element_bytes(unit, j);
        for (uint32_t j = 0; j < unit->chunk_count; j++) {
            const struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + j];
            if (chunk->planned_step == engine->step && chunk->read_step != engine->step)
                stats->planned_bytes[LH_ENGINE_LINK_STATE_READ] -= chunk->planned_bytes;
        }
    }
}
