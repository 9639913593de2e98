#include "sched/slab.h"

#include <inttypes.h>

#include "sched/engine_private.h"

uint8_t *lh_slab_array(const struct lh_slab *slab, const struct lh_unit *unit, uint32_t array,
                       uint64_t count)
{
    uint64_t offset = 0;
    LH_ASSERT(array <= LH_STATE_ARRAY_COUNT);
    for (uint32_t i = 0; i < array; i++)
        offset += lh_unit_state_bytes(&unit->states[i], count);
    return slab->memory + offset;
}

/*
 * Find a free slab, or, unless unit's update is not queued yet, take one whose chunk was only read
 * ahead, as were those of units that wait for another unit's matrices. If there is neither, unit is
 * NULL or UPDATING, and every slab holds a LOADED chunk of a queued unit that is not UPDATING (its
 * parameters may wait for the room that unit occupies), or of one that collects its chunks, take
 * one of the former slabs, because no slab would ever become free otherwise.
 */
uint32_t lh_slab_find(struct lh_engine *engine, const struct lh_unit *unit)
{
    uint32_t ahead = LH_CHUNK_NONE;
    uint32_t blocked = LH_CHUNK_NONE;
    bool is_moving = false;
    for (uint32_t i = engine->budget.kept_chunk_count; i < engine->budget.slab_count; i++) {
        const struct lh_slab *slab = &engine->slabs[i];
        if (slab->chunk == LH_CHUNK_NONE)
            return i;
        if (slab->is_lent) {
            is_moving = true;
            continue;
        }
        const struct lh_chunk *chunk = &engine->chunks[slab->chunk];
        const struct lh_unit *owner = &engine->units[chunk->unit];
        LH_ASSERT(chunk->slab == i && !chunk->is_kept);
        if (chunk->state != LH_CHUNK_STATE_LOADED)
            is_moving = true;
        else if (owner->state == LH_UNIT_STATE_UPDATING)
            is_moving |= owner->update.turn != LH_UPDATE_TURN_COLLECTS;
        else if (owner->update.is_queued && owner->update.turn != LH_UPDATE_TURN_WAITS)
            blocked = i;
        else
            ahead = i;
    }
    if (unit && !unit->update.is_queued)
        return LH_CHUNK_NONE;
    uint32_t stolen = ahead;
    if (stolen == LH_CHUNK_NONE && !is_moving && (!unit || unit->state == LH_UNIT_STATE_UPDATING))
        stolen = blocked;
    if (stolen == LH_CHUNK_NONE)
        return LH_CHUNK_NONE;
    lh_slab_clear(engine, &engine->slabs[stolen]);
    engine->updates.ahead_first = 0; /* the chunk may be read ahead again */
    return stolen;
}

void lh_slab_give(struct lh_engine *engine, struct lh_slab *slab, struct lh_chunk *chunk)
{
    LH_ASSERT(slab->chunk == LH_CHUNK_NONE && !slab->is_lent && !slab->gradients);
    LH_ASSERT(chunk->slab == LH_CHUNK_NONE && chunk->state == LH_CHUNK_STATE_IDLE);
    slab->chunk = (uint32_t)(chunk - engine->chunks);
    chunk->slab = (uint32_t)(slab - engine->slabs);
}

void lh_slab_lend(struct lh_engine *engine, struct lh_slab *slab, const struct lh_chunk *chunk)
{
    LH_ASSERT(slab->chunk == LH_CHUNK_NONE && !slab->is_lent);
    LH_ASSERT(!slab->gradients);
    slab->chunk = (uint32_t)(chunk - engine->chunks);
    slab->is_lent = true;
}

void lh_slab_return(struct lh_engine *engine, struct lh_slab *slab)
{
    (void)engine;
    LH_ASSERT(slab->is_lent && slab->chunk != LH_CHUNK_NONE);
    slab->chunk = LH_CHUNK_NONE;
    slab->is_lent = false;
}

void lh_slab_clear(struct lh_engine *engine, struct lh_slab *slab)
{
    LH_ASSERT(slab->chunk != LH_CHUNK_NONE && !slab->is_lent);
    struct lh_chunk *chunk = &engine->chunks[slab->chunk];
    LH_ASSERT(chunk->slab == (uint32_t)(slab - engine->slabs));
    lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_IDLE);
    chunk->slab = LH_CHUNK_NONE;
    slab->chunk = LH_CHUNK_NONE;
    slab->gradients = NULL;
}

void lh_slab_job_account(struct lh_engine *engine, const struct lh_job *job,
                         enum lh_engine_trace_kind kind)
{
    const struct lh_slab *slab = job->exec.context;
    LH_ASSERT(slab->chunk != LH_CHUNK_NONE && job->exec.ended_ns >= job->exec.started_ns);
    lh_core_stats(engine, lh_core_step(engine))->update_busy_ns +=
        job->exec.ended_ns - job->exec.started_ns;
    lh_core_trace_add(engine, (struct lh_engine_trace_event){
                                  .kind = kind,
                                  .unit = engine->chunks[slab->chunk].unit,
                                  .lane = job->exec.worker_index,
                                  .start_ns = job->exec.started_ns,
                                  .end_ns = job->exec.ended_ns,
                                  .bytes = job->exec.work_bytes,
                              });
}

/* An upper bound on the number of parameters that have elements in one chunk. */
static uint64_t segments_max(const struct lh_engine *engine)
{
    uint64_t most = 1;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        most = lh_max_u64(most, engine->units[i].desc->param_count);
    return lh_min_u64(most, engine->budget.chunk_elements / LH_ENGINE_PARAM_ALIGN + 2);
}

int lh_slab_create(struct lh_engine *engine, struct lh_error *err)
{
    struct lh_alloc *alloc = engine->alloc;
    uint64_t segment_max = segments_max(engine);
    uint64_t checksum_max = lh_div_ceil(engine->budget.chunk_elements * 4, LH_CHECKSUM_BYTES);
    uint32_t count = engine->budget.slab_count;
    LH_ASSERT(engine->budget.kept_chunk_count <= count);
    engine->slabs = lh_alloc_zeroed(alloc, lh_max_u64(count, 1), sizeof(*engine->slabs));
    if (!engine->slabs)
        return lh_error_set(err, -ENOMEM, "no memory for %u slabs", count);
    for (uint32_t i = 0; i < count; i++) {
        struct lh_slab *slab = &engine->slabs[i];
        slab->engine = engine;
        slab->chunk = LH_CHUNK_NONE;
        slab->memory = engine->slab_memory + i * engine->budget.slab_bytes;
        slab->segments = lh_alloc_zeroed(alloc, segment_max, sizeof(*slab->segments));
        bool failed = !slab->segments;
        for (uint32_t j = 0; j < LH_STATE_ARRAY_COUNT; j++) {
            slab->expected[j] = lh_alloc_zeroed(alloc, checksum_max, sizeof(uint32_t));
            failed |= !slab->expected[j];
        }
        if (failed)
            return lh_error_set(err, -ENOMEM, "no memory for slab %u of %u", i, count);
    }
    return 0;
}

void lh_slab_destroy(struct lh_engine *engine)
{
    for (uint32_t i = 0; engine->slabs && i < engine->budget.slab_count; i++) {
        lh_free(engine->alloc, engine->slabs[i].segments);
        for (uint32_t j = 0; j < LH_STATE_ARRAY_COUNT; j++)
            lh_free(engine->alloc, engine->slabs[i].expected[j]);
    }
    lh_free(engine->alloc, engine->slabs);
}
