/*
 * Gradients that wait for the step's close on SSD, where main memory has no room for them.
 *
 * They lie where the unit's next parameters will: in the slot of P that no commit needs until the
 * update has written it, element by element at the same places. So they take no space of their own,
 * and chunk i of P may be written as soon as chunk i of the gradients was read.
 *
 *      NONE --[all gradients are here]--> RUNNING --[all chunks written]--> DONE
 *                                          per chunk: gather into a slab (a worker) -> write
 *      update: per chunk: read R, M, V and the gradients into a slab -> AdamW -> write P, R, M, V
 *
 * Nothing is rounded: gradients have the parameters' dtype. Their checksums stand for those of P's
 * write slot until the update makes these.
 *
 * Source: Fuyou 4.3 (gradients leave the device as they appear); that they need no space is ours.
 */
#include <string.h>

#include "base/crc32c.h"
#include "sched/engine_private.h"

/* Behind R, M and V of a full chunk, for gradients that are read for an update. */
uint8_t *lh_spill_gradients(const struct lh_slab *slab, const struct lh_unit *unit,
                            const struct lh_chunk *chunk)
{
    uint64_t offset = 0;

    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++)
        offset += chunk->count * lh_state_element_bytes(unit, i);
    return slab->memory + offset;
}

/* They lie at the parameters' places, so they have the parameters' size. torch's always do. */
static bool is_like_params(const struct lh_engine *engine, const struct lh_unit *unit)
{
    for (uint32_t i = 0; i < unit->desc.param_count; i++) {
        const struct lh_gradient *gradient = &engine->gradients[unit->desc.param_first + i];

        if (gradient->pointer && gradient->dtype != unit->desc.dtype)
            return false;
    }
    return true;
}

/*
 * All gradients that will come are here. Once the norm is asked no more come; those from an
 * accelerator must have a place then.
 */
static bool is_whole(const struct lh_engine *engine, const struct lh_unit *unit)
{
    return unit->gradient_count == unit->desc.param_count ||
           (lh_landing_is_used(engine) && engine->norm_is_asked && unit->gradient_count > 0);
}

void lh_spill_consider(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);

    if (!unit->spills || unit->spill_state != LH_SPILL_STATE_NONE ||
        engine->step_state != LH_STEP_STATE_OPEN || !is_whole(engine, unit) ||
        !is_like_params(engine, unit))
        return;
    unit->spill_state = LH_SPILL_STATE_RUNNING;
    unit->spill_next = 0;
    unit->spill_written = 0;
    engine->spill_queue[engine->spill_count++] = index;
    uint64_t held = atomic_fetch_add(&engine->update_gradient_bytes, unit->gradient_bytes) +
                    unit->gradient_bytes;
    struct lh_engine_step_stats *stats = lh_step_stats(engine, lh_step_current(engine));
    stats->gradient_bytes_max = lh_max_u64(stats->gradient_bytes_max, held);
}

/* On a worker: the chunk's gradients in their places, zeros between them, and checksums. */
static void gather_run(struct lh_exec_job *job)
{
    struct lh_slab *slab = job->context;
    struct lh_engine *engine = slab->engine;
    const struct lh_chunk *chunk = &engine->chunks[slab->chunk];
    const struct lh_unit *unit = &engine->units[chunk->unit];
    const uint64_t element_bytes = lh_dtype_bytes(unit->desc.dtype);
    const uint64_t bytes = chunk->count * element_bytes;

    memset(slab->memory, 0, bytes);
    for (uint32_t i = 0; i < unit->desc.param_count; i++) {
        const struct lh_engine_param *param = &engine->params[unit->desc.param_first + i];
        uint64_t first = lh_max_u64(param->first, chunk->first);
        uint64_t end = lh_min_u64(param->first + param->count, chunk->first + chunk->count);

        if (first < end && engine->gradients[unit->desc.param_first + i].pointer)
            memcpy(slab->memory + (first - chunk->first) * element_bytes,
                   lh_landing_bytes(engine, unit->desc.param_first + i, first),
                   (end - first) * element_bytes);
    }
    for (uint64_t at = 0; at < bytes; at += LH_CHECKSUM_BYTES)
        slab->spill_checksums[at / LH_CHECKSUM_BYTES] =
            lh_crc32c(0, slab->memory + at, lh_min_u64(LH_CHECKSUM_BYTES, bytes - at));
}

static void gather_start(struct lh_engine *engine, struct lh_unit *unit, uint32_t slab_index)
{
    struct lh_slab *slab = &engine->slabs[slab_index];
    struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + unit->spill_next++];
    uint64_t element_bytes = lh_dtype_bytes(unit->desc.dtype);
    uint32_t slot = lh_store_write_slot(engine->store, unit->desc.store_group);
    uint32_t count = 0;
    uint32_t *checksums = lh_store_checksums(engine->store, unit->desc.param_extent, slot, &count);

    LH_ASSERT(slot != lh_store_read_slot(engine->store, unit->desc.store_group));
    slab->chunk = (uint32_t)(chunk - engine->chunks);
    slab->is_spill = true;
    slab->spill_checksums = checksums + chunk->first * element_bytes / LH_CHECKSUM_BYTES;
    slab->job = (struct lh_exec_job){
        .run = gather_run, .context = slab, .work_bytes = 2 * chunk->count * element_bytes};
    lh_job_submit(engine, &slab->job);
}

bool lh_spill_pump(struct lh_engine *engine)
{
    bool moved = false;

    for (uint32_t i = engine->spill_first; i < engine->spill_count; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, engine->spill_queue[i]);

        while (unit->spill_next < unit->chunk_count && lh_landing_is_over(unit)) {
            uint32_t slab = lh_slab_take(engine);

            if (slab == LH_CHUNK_NONE)
                return moved;
            gather_start(engine, unit, slab);
            moved = true;
        }
        if (i == engine->spill_first && unit->spill_next == unit->chunk_count)
            engine->spill_first++;
    }
    return moved;
}

void lh_spill_gathered(struct lh_engine *engine, struct lh_slab *slab)
{
    const struct lh_chunk *chunk = &engine->chunks[slab->chunk];
    const struct lh_unit *unit = &engine->units[chunk->unit];
    uint64_t element_bytes = lh_dtype_bytes(unit->desc.dtype);

    slab->transfers[0] = (struct lh_transfer){
        .kind = LH_IO_KIND_WRITE,
        .priority = LH_PRIORITY_WRITE,
        .link = LH_ENGINE_LINK_GRADIENT_WRITE,
        .unit = chunk->unit,
        .slab = (uint32_t)(slab - engine->slabs),
        .step = lh_step_current(engine),
        .extent = unit->desc.param_extent,
        .slot = lh_store_write_slot(engine->store, unit->desc.store_group),
        .offset = chunk->first * element_bytes,
        .bytes = chunk->count * element_bytes,
        .buffer = slab->memory,
    };
    lh_transfer_submit(engine, &slab->transfers[0]);
}

/* A chunk's gradients are on SSD; after the last one the tensors are free. */
void lh_spill_written(struct lh_engine *engine, struct lh_slab *slab)
{
    uint32_t index = engine->chunks[slab->chunk].unit;
    struct lh_unit *unit = lh_engine_unit_at(engine, index);

    slab->chunk = LH_CHUNK_NONE;
    slab->is_spill = false;
    if (++unit->spill_written < unit->chunk_count)
        return;
    unit->spill_state = LH_SPILL_STATE_DONE;
    if (unit->norm_state == LH_NORM_STATE_DONE)
        lh_spill_release(engine, unit);
}

void lh_spill_release(struct lh_engine *engine, struct lh_unit *unit)
{
    for (uint32_t i = 0; i < unit->desc.param_count; i++)
        atomic_store(&engine->gradients[unit->desc.param_first + i].is_held, false);
    for (uint32_t i = 0; i < unit->chunk_count; i++)
        lh_landing_release(engine, &engine->chunks[unit->chunk_first + i]);
    atomic_fetch_sub(&engine->update_gradient_bytes, unit->gradient_bytes);
    unit->gradient_bytes = 0;
    lh_engine_notify(engine);
}

/* Read a chunk's gradients into its slab, besides what else is read there. */
void lh_spill_read(struct lh_engine *engine, struct lh_chunk *chunk)
{
    struct lh_slab *slab = &engine->slabs[chunk->slab];
    const struct lh_unit *unit = &engine->units[chunk->unit];
    uint64_t element_bytes = lh_dtype_bytes(unit->desc.dtype);

    slab->has_gradients = true;
    if (chunk->gradient_step == lh_step_current(engine)) /* its slab was taken in between */
        lh_step_stats(engine, chunk->gradient_step)->planned_bytes[LH_ENGINE_LINK_GRADIENT_READ] +=
            chunk->count * element_bytes;
    chunk->gradient_step = lh_step_current(engine);
    slab->transfers[LH_STATE_ARRAY_COUNT] = (struct lh_transfer){
        .kind = LH_IO_KIND_READ,
        .priority = LH_PRIORITY_STATE,
        .link = LH_ENGINE_LINK_GRADIENT_READ,
        .unit = chunk->unit,
        .slab = chunk->slab,
        .step = lh_step_current(engine),
        .extent = unit->desc.param_extent,
        .slot = lh_store_write_slot(engine->store, unit->desc.store_group),
        .offset = chunk->first * element_bytes,
        .bytes = chunk->count * element_bytes,
        .buffer = lh_spill_gradients(slab, unit, chunk),
    };
    slab->pending++;
    lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_READING);
    lh_transfer_submit(engine, &slab->transfers[LH_STATE_ARRAY_COUNT]);
}

void lh_spill_step_over(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        engine->units[i].spill_state = LH_SPILL_STATE_NONE;
    for (uint32_t i = 0; i < engine->chunk_count; i++)
        engine->chunks[i].gradient_step = 0;
    for (uint32_t i = 0; i < engine->budget.slab_count; i++) {
        struct lh_slab *slab = &engine->slabs[i];

        slab->has_gradients = false;
        if (!slab->is_spill)
            continue;
        slab->is_spill = false; /* of a step that died */
        slab->chunk = LH_CHUNK_NONE;
    }
    engine->spill_first = 0;
    engine->spill_count = 0;
}

/* A slab has room for a chunk's gradients besides: the budget was made for gradients on SSD. */
static bool may_spill(const struct lh_engine *engine, const struct lh_unit *unit)
{
    uint64_t element_bytes = lh_dtype_bytes(unit->desc.dtype);

    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++)
        element_bytes += lh_state_element_bytes(unit, i);
    return engine->opts.commit_every == 1 &&
           engine->budget.chunk_elements * element_bytes <= engine->budget.slab_bytes;
}

/* Which units' gradients wait on SSD: those behind the first ones that fit, in order of use. */
void lh_spill_choose(struct lh_engine *engine)
{
    uint64_t room = engine->budget.gradient_waiting_bytes;

    if (lh_landing_is_used(engine))
        room = room / lh_max_u64(engine->block_bytes, 1) * engine->block_bytes;
    engine->any_spills = false;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];

        unit->spills = false;
        if (!unit->is_deferred || unit->desc.elements == 0 || !may_spill(engine, unit))
            continue;
        unit->spills = lh_landing_waiting_bytes(engine, unit) > room;
        engine->any_spills |= unit->spills;
        room = unit->spills ? 0 : room - lh_landing_waiting_bytes(engine, unit);
    }
}
