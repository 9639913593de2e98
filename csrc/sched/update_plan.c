/* What a step's updates will read and write, counted before they do. */
#include "compute/adam.h"
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
    return unit->desc.residual_extent == LH_ENGINE_EXTENT_NONE
               ? 0
               : lh_adam_residual_bytes(unit->desc.dtype);
}

/* Bytes that reading a chunk moves; what was never written is not read. */
static uint64_t chunk_bytes(const struct lh_engine *engine, const struct lh_chunk *chunk,
                            bool is_written)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    uint32_t slot = lh_store_read_slot(engine->store, unit->desc.store_group);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++) {
        uint64_t element_bytes = lh_state_element_bytes(unit, i);
        if (element_bytes > 0 &&
            (is_written || !lh_store_is_zero(engine->store, lh_state_extent(unit, i), slot)))
            bytes += chunk->count * element_bytes;
    }
    return bytes;
}

/*
 * Bytes that step, which updates the chunk, has still to read for it. Behind a step that is not
 * over one knows how that leaves the chunk: in its slab if it is kept, else on SSD only.
 */
static uint64_t chunk_left_bytes(const struct lh_engine *engine, const struct lh_chunk *chunk,
                                 uint64_t step)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    if (step > lh_step_current(engine) && unit->gradient_count > 0)
        return chunk->is_kept ? 0 : chunk_bytes(engine, chunk, true);
    if (chunk->state != LH_CHUNK_STATE_IDLE || chunk->computed_step == step)
        return 0;
    return chunk_bytes(engine, chunk, false);
}

static uint64_t chunk_read_bytes(const struct lh_chunk *chunk, uint64_t step)
{
    return chunk->read_step == step ? chunk->read_bytes : 0;
}

/* Of all its gradients, in the parameters' dtype. */
static uint64_t all_gradient_bytes(const struct lh_engine *engine, const struct lh_unit *unit)
{
    uint64_t elements = 0;
    for (uint32_t i = 0; i < unit->desc.param_count; i++)
        elements += engine->params[unit->desc.param_first + i].count;
    return elements * lh_dtype_bytes(unit->desc.dtype);
}

/* Count the reads and writes of a unit's update into step's plan. */
static void unit_plan(struct lh_engine *engine, struct lh_unit *unit, uint64_t step)
{
    struct lh_engine_step_stats *stats = lh_step_stats(engine, step);
    unit->planned_step = step;
    unit->landing_planned_bytes = lh_landing_is_used(engine) ? all_gradient_bytes(engine, unit) : 0;
    stats->planned_bytes[LH_ENGINE_LINK_COPY_OUT] += unit->landing_planned_bytes;
    unit->spill_planned_step = unit->spills ? step : 0;
    if (unit->spills) {
        stats->planned_bytes[LH_ENGINE_LINK_GRADIENT_WRITE] += unit->desc.bytes;
        stats->planned_bytes[LH_ENGINE_LINK_GRADIENT_READ] += unit->desc.bytes;
    }
    for (uint32_t i = 0; i < unit->chunk_count; i++) {
        struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + i];
        stats->planned_bytes[LH_ENGINE_LINK_STATE_WRITE] +=
            lh_chunk_state_write_bytes(engine, chunk, step);
        stats->planned_bytes[LH_ENGINE_LINK_PARAM_WRITE] +=
            lh_chunk_param_write_bytes(engine, chunk, step);
        uint64_t bytes = chunk_read_bytes(chunk, step) + chunk_left_bytes(engine, chunk, step);
        chunk->planned_steps[step % 2] = step;
        chunk->planned_bytes[step % 2] = bytes;
        stats->planned_bytes[LH_ENGINE_LINK_STATE_READ] += bytes;
    }
}

/* Take a unit that is not updated after all out of step's plan, but for what was read already. */
static void unit_unplan(struct lh_engine *engine, struct lh_unit *unit, uint64_t step)
{
    struct lh_engine_step_stats *stats = lh_step_stats(engine, step);
    for (uint32_t i = 0; i < unit->chunk_count; i++) {
        struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + i];
        stats->planned_bytes[LH_ENGINE_LINK_STATE_WRITE] -=
            lh_chunk_state_write_bytes(engine, chunk, step);
        stats->planned_bytes[LH_ENGINE_LINK_PARAM_WRITE] -=
            lh_chunk_param_write_bytes(engine, chunk, step);
        uint64_t bytes = chunk_read_bytes(chunk, step);
        LH_ASSERT(chunk->planned_bytes[step % 2] >= bytes);
        stats->planned_bytes[LH_ENGINE_LINK_STATE_READ] -= chunk->planned_bytes[step % 2] - bytes;
        chunk->planned_bytes[step % 2] = bytes;
    }
}

/* Not all of its gradients came: those that did wait in memory. */
static void spill_unplan(struct lh_engine *engine, struct lh_unit *unit)
{
    struct lh_engine_step_stats *stats = lh_step_stats(engine, unit->spill_planned_step);
    stats->planned_bytes[LH_ENGINE_LINK_GRADIENT_WRITE] -= unit->desc.bytes;
    stats->planned_bytes[LH_ENGINE_LINK_GRADIENT_READ] -= unit->desc.bytes;
    unit->spill_planned_step = 0;
}

/* What the step will read and write for its updates, as far as one knows at its begin. */
void lh_update_plan(struct lh_engine *engine)
{
    struct lh_engine_step_stats *stats = lh_step_stats(engine, engine->plan_step);
    bool is_closing = engine->plan_step > lh_step_current(engine);
    stats->planned_bytes[LH_ENGINE_LINK_STATE_READ] = 0;
    stats->planned_bytes[LH_ENGINE_LINK_STATE_WRITE] = 0;
    stats->planned_bytes[LH_ENGINE_LINK_PARAM_WRITE] = 0;
    stats->planned_bytes[LH_ENGINE_LINK_GRADIENT_WRITE] = 0;
    stats->planned_bytes[LH_ENGINE_LINK_GRADIENT_READ] = 0;
    stats->planned_bytes[LH_ENGINE_LINK_COPY_OUT] = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        if (is_closing)
            unit->is_predicted = unit->gradient_count > 0;
        if (unit->is_predicted)
            unit_plan(engine, unit, engine->plan_step);
    }
}

/* Chunks that were read ahead of an update that no plan of this step knows. */
static void unit_plan_reads(struct lh_engine *engine, struct lh_unit *unit, uint64_t step)
{
    for (uint32_t i = 0; i < unit->chunk_count; i++) {
        struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + i];
        if (chunk->planned_steps[step % 2] == step)
            continue;
        chunk->planned_steps[step % 2] = step;
        chunk->planned_bytes[step % 2] = chunk_read_bytes(chunk, step);
        lh_step_stats(engine, step)->planned_bytes[LH_ENGINE_LINK_STATE_READ] +=
            chunk->planned_bytes[step % 2];
    }
}

/* Not every parameter had a gradient; or none was expected. */
static void landing_plan_correct(struct lh_engine *engine, struct lh_unit *unit)
{
    struct lh_engine_step_stats *stats = lh_step_stats(engine, engine->step);
    uint64_t planned = unit->planned_step == engine->step ? unit->landing_planned_bytes : 0;
    stats->planned_bytes[LH_ENGINE_LINK_COPY_OUT] += unit->landed_bytes - planned;
}

/*
 * At close one knows which units have gradients: the plan is corrected where the last step misled
 * it, or where the step has gradients of a graph from before and no forward of its own.
 */
void lh_update_plan_correct(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        bool is_updated = unit->gradient_count > 0;
        bool is_planned = unit->planned_step == engine->step;
        if (is_updated != is_planned)
            lh_step_stats(engine, engine->step)->replans++;
        if (is_updated && !is_planned)
            unit_plan(engine, unit, engine->step);
        else if (is_planned && !is_updated)
            unit_unplan(engine, unit, engine->step);
        else if (!is_planned)
            unit_plan_reads(engine, unit, engine->step);
        landing_plan_correct(engine, unit);
        if (unit->spill_planned_step == engine->step && unit->spill_state == LH_SPILL_STATE_NONE)
            spill_unplan(engine, unit);
    }
}

/*
 * A chunk is being read: where that is more than planned its slab was taken for a unit that came
 * before the one predicted, and it is read again.
 */
void lh_update_plan_reread(struct lh_engine *engine, struct lh_chunk *chunk)
{
    uint64_t step = chunk->read_step;
    uint64_t *planned = &chunk->planned_bytes[step % 2];
    if (chunk->planned_steps[step % 2] != step || chunk->read_bytes <= *planned)
        return;
    struct lh_engine_step_stats *stats = lh_step_stats(engine, step);
    stats->planned_bytes[LH_ENGINE_LINK_STATE_READ] += chunk->read_bytes - *planned;
    *planned = chunk->read_bytes;
}
