/* What a step's updates leave behind: at its end, when it dies, when a unit's extents change. */
#include <string.h>

#include "sched/engine_private.h"

static void step_forget(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        unit->gradient_count = 0;
        unit->gradient_bytes = 0;
        unit->update_is_queued = false;
        unit->update_is_done = false;
        unit->chunks_computed = 0;
        unit->chunks_written = 0;
    }
    lh_norm_forget(engine);
    if (engine->dev)
        lh_landing_forget(engine);
    for (uint32_t i = 0; i < engine->param_count; i++)
        engine->gradients[i].pointer = NULL;
    engine->update_first = 0;
    engine->update_count = 0;
    engine->updates_done = 0;
    engine->gradient_unit_count = 0;
    lh_chunks_recount(engine);
}

void lh_update_step_over(struct lh_engine *engine)
{
    engine->predicted_update_count = engine->update_count;
    memcpy(engine->predicted_updates, engine->update_queue,
           engine->update_count * sizeof(*engine->update_queue));
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        engine->units[i].is_predicted = engine->units[i].update_is_queued;
    /* What was read ahead for units that got no gradient would keep slabs from the next step. */
    for (uint32_t i = engine->budget.kept_chunk_count; i < engine->budget.slab_count; i++) {
        if (engine->slabs[i].chunk != LH_CHUNK_NONE)
            lh_slab_clear(engine, &engine->slabs[i]);
    }
    lh_defer_step_over(engine);
    lh_spill_step_over(engine);
    step_forget(engine);
}

void lh_update_forget_unit(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    unit->is_param_dirty = false;
    for (uint32_t i = 0; i < unit->chunk_count; i++)
        engine->chunks[unit->chunk_first + i].computed_step = 0;
    lh_chunks_recount(engine);
    for (uint32_t i = 0; i < unit->chunk_count; i++) {
        struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + i];
        chunk->is_dirty = false;
        chunk->is_flushing = false;
        if (chunk->slab == LH_CHUNK_NONE)
            continue;
        LH_ASSERT(chunk->state != LH_CHUNK_STATE_READING);
        lh_slab_clear(engine, &engine->slabs[chunk->slab]);
    }
}

/*
 * Nothing is in flight: forget every gradient, and the bytes of every unit that an update has
 * touched.
 */
void lh_update_rollback(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->update_count; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, engine->update_queue[i]);
        if (unit->chunks_computed == 0) { /* it may be dirty: nothing of it is lost */
            if (unit->state == LH_UNIT_STATE_UPDATING)
                lh_unit_make_ready(engine, unit);
            continue;
        }
        lh_update_forget_unit(engine, engine->update_queue[i]);
        /* Where uses follow the update in the prediction, its new bytes were copied already. */
        lh_device_forget(engine, unit);
        if (unit->state == LH_UNIT_STATE_READY)
            lh_unit_forget(engine, engine->update_queue[i]);
        else if (unit->state == LH_UNIT_STATE_UPDATING)
            unit->state = LH_UNIT_STATE_ABSENT;
    }
    engine->chunks_busy = 0;
    lh_spill_step_over(engine);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        engine->units[i].planned_step = 0;
    for (uint32_t i = 0; i < engine->chunk_count; i++) {
        /* The step begins again, and its counters with it. */
        engine->chunks[i].read_step = 0;
        engine->chunks[i].planned_steps[(engine->step + 1) % 2] = 0;
    }
    for (uint32_t i = 0; i < engine->param_count; i++)
        atomic_store(&engine->gradients[i].is_held, false);
    atomic_store(&engine->update_gradient_bytes, 0);
    step_forget(engine);
}
