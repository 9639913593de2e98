/*
 * Schedule NAIVE, a baseline: all chunks of a unit are read, then all are computed, then all are
 * written, before the next unit begins. A unit with more chunks than there are slabs is processed
 * in groups.
 *
 * Source: LoHan IV-C fig. 3a.
 */
#include "sched/naive.h"

#include "sched/engine_private.h"

/*
 * The unit whose update is in progress, or else the first queued unit whose update can begin now (a
 * unit that waits for room must not block the others), or NULL.
 */
static struct lh_unit *unit_next(struct lh_engine *engine, struct lh_update_pump *pump)
{
    for (uint32_t i = engine->updates.first; i < engine->updates.count; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, engine->updates.queue[i]);
        if (unit->state == LH_UNIT_STATE_UPDATING)
            return unit;
    }
    for (uint32_t i = engine->updates.first; i < engine->updates.count; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, engine->updates.queue[i]);
        bool may_start = LH_FEATURE_ALL(engine, update_may_start, unit);
        if (may_start && lh_update_pump_take(engine, unit)) {
            pump->moved = true;
            return unit;
        }
    }
    return NULL;
}

/* Whether all of the unit's gradients have landed. */
static bool update_may_start(const struct lh_engine *engine, const struct lh_unit *unit)
{
    (void)engine;
    return unit->parts->landing.count == 0;
}

static void unit_pump(struct lh_engine *engine, struct lh_unit *unit, struct lh_update_pump *pump)
{
    bool is_reading = false;
    LH_ASSERT(unit->state == LH_UNIT_STATE_UPDATING);
    for (uint32_t i = lh_update_pump_next(engine, unit); i < unit->chunk_count; i++) {
        struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + i];
        if (chunk->state == LH_CHUNK_STATE_IDLE && !lh_update_pump_fetch(engine, chunk, pump))
            break;
        is_reading |= chunk->state == LH_CHUNK_STATE_READING;
    }
    for (uint32_t i = lh_update_pump_next(engine, unit); i < unit->chunk_count && !is_reading;
         i++) {
        struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + i];
        bool may = LH_FEATURE_ALL(engine, chunk_may_compute, chunk);
        if (chunk->state != LH_CHUNK_STATE_LOADED || !may)
            break;
        lh_chunk_compute(engine, chunk);
        pump->moved = true;
    }
}

void lh_naive_pump_updates(struct lh_engine *engine, struct lh_update_pump *pump)
{
    struct lh_unit *unit = engine->updates.chunks_busy == 0 ? unit_next(engine, pump) : NULL;
    if (unit)
        unit_pump(engine, unit, pump);
}

/* Start the writes of all COMPUTED chunks once no chunk is COMPUTING any more. */
static bool chunk_may_write(struct lh_engine *engine, struct lh_chunk *computed)
{
    const struct lh_slab *slabs = engine->slabs;
    LH_ASSERT(computed->state == LH_CHUNK_STATE_COMPUTED);
    for (uint32_t i = 0; i < engine->budget.slab_count; i++) {
        if (slabs[i].chunk != LH_CHUNK_NONE &&
            engine->chunks[slabs[i].chunk].state == LH_CHUNK_STATE_COMPUTING)
            return false;
    }
    for (uint32_t i = 0; i < engine->budget.slab_count; i++) {
        if (slabs[i].chunk != LH_CHUNK_NONE &&
            engine->chunks[slabs[i].chunk].state == LH_CHUNK_STATE_COMPUTED)
            lh_write_back_chunk(engine, &engine->chunks[slabs[i].chunk]);
    }
    return false;
}

const struct lh_feature lh_naive_feature = {
    .name = "naive",
    .update_may_start = update_may_start,
    .chunk_may_write = chunk_may_write,
};
