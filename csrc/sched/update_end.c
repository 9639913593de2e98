#include "sched/update_end.h"

#include <string.h>

#include "sched/engine_private.h"

static void step_forget(struct lh_engine *engine)
{
    LH_ASSERT(engine->updates.chunks_busy == 0);
    LH_FEATURE_CALL(engine, step_forgotten);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        unit->update.gradient_count = 0;
        unit->update.gradient_bytes = 0;
        unit->update.is_queued = false;
        unit->update.is_counted = false;
        unit->update.is_done = false;
        unit->update.chunks_computed = 0;
        unit->update.chunks_written = 0;
    }
    for (uint32_t i = 0; i < engine->param_count; i++)
        engine->gradients[i].pointer = NULL;
    engine->updates.first = 0;
    engine->updates.count = 0;
    engine->updates.done_count = 0;
    engine->updates.gradient_unit_count = 0;
    lh_chunk_recount(engine);
}

void lh_update_end_step(struct lh_engine *engine, const struct lh_engine_step_stats *stats)
{
    LH_ASSERT(engine->updates.done_count == engine->updates.count);
    engine->updates.predicted_count = engine->updates.count;
    memcpy(engine->updates.predicted, engine->updates.queue,
           engine->updates.count * sizeof(*engine->updates.queue));
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        engine->units[i].update.is_predicted = engine->units[i].update.is_queued;
    /* Free the slabs of chunks that were read ahead for units that then had no gradients. */
    for (uint32_t i = engine->budget.kept_chunk_count; i < engine->budget.slab_count; i++) {
        if (engine->slabs[i].chunk != LH_CHUNK_NONE)
            lh_slab_clear(engine, &engine->slabs[i]);
    }
    LH_FEATURE_CALL(engine, step_over, stats);
    step_forget(engine);
}

void lh_update_end_forget_unit(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    unit->update.is_param_dirty = false;
    for (uint32_t i = 0; i < unit->chunk_count; i++)
        engine->chunks[unit->chunk_first + i].computed_step = 0;
    lh_chunk_recount(engine);
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

void lh_update_end_rollback(struct lh_engine *engine)
{
    LH_ASSERT(engine->step_state == LH_STEP_STATE_ABORTING);
    for (uint32_t i = 0; i < engine->updates.count; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, engine->updates.queue[i]);
        if (unit->update.chunks_computed == 0) { /* unchanged: keep it, as it may be dirty */
            if (unit->state == LH_UNIT_STATE_UPDATING)
                lh_unit_make_ready(engine, unit);
            continue;
        }
        lh_update_end_forget_unit(engine, engine->updates.queue[i]);
        /*
         * The unit's new bytes may have been copied already, if uses after the update were
         * predicted.
         */
        LH_FEATURE_CALL(engine, unit_forgotten, unit);
        if (unit->state == LH_UNIT_STATE_READY)
            lh_unit_forget(engine, engine->updates.queue[i]);
        else if (unit->state == LH_UNIT_STATE_UPDATING)
            lh_unit_state_set(unit, LH_UNIT_STATE_ABSENT);
    }
    engine->updates.chunks_busy = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        engine->units[i].update.planned_step = 0;
    for (uint32_t i = 0; i < engine->chunk_count; i++) {
        /* The step starts over, and so do its counters. */
        engine->chunks[i].read_step = 0;
        engine->chunks[i].planned_steps[(engine->step + 1) % 2] = 0;
    }
    for (uint32_t i = 0; i < engine->param_count; i++)
        lh_gradient_release(engine, i);
    atomic_store(&engine->update_gradient_bytes, 0);
    step_forget(engine);
}
