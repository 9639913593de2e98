#include "sched/write_back.h"

#include <string.h>

#include "sched/engine_private.h"

static bool is_due(const struct lh_engine *engine, const struct lh_chunk *chunk, uint64_t step)
{
    return !chunk->is_kept || lh_step_commits(engine, step);
}

static bool param_is_due(const struct lh_engine *engine, uint32_t unit, uint64_t step)
{
    return !lh_residency_has_place(&engine->host_region.plan, unit) ||
           lh_step_commits(engine, step);
}

uint64_t lh_write_back_state_bytes(const struct lh_engine *engine, const struct lh_chunk *chunk,
                                   uint64_t step)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++)
        bytes += lh_unit_state_bytes(&unit->states[i], chunk->count);
    return is_due(engine, chunk, step) ? bytes : 0;
}

uint64_t lh_write_back_param_bytes(const struct lh_engine *engine, const struct lh_chunk *chunk,
                                   uint64_t step)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    uint64_t bytes = chunk->count * lh_dtype_bytes(unit->desc->dtype);
    return param_is_due(engine, chunk->unit, step) ? bytes : 0;
}

/* Everything of a unit except what is dirty is on SSD: the write slot now has the newest bytes. */
static void unit_written(struct lh_engine *engine, struct lh_unit *unit)
{
    uint32_t slot = lh_store_write_slot(engine->store, unit->desc->store_group);
    LH_ASSERT(unit->update.is_queued && !unit->update.is_done);
    LH_ASSERT(unit->update.chunks_computed == unit->chunk_count);
    for (uint32_t c = 0; c < unit->chunk_count; c++) {
        const struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + c];
        for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++) {
            struct lh_unit_state_place place =
                lh_unit_state_place(unit, i, chunk->first, chunk->count);
            if (place.bytes > 0)
                lh_store_clear_zero(engine->store, place.extent, slot);
        }
    }
    lh_store_clear_zero(engine->store, unit->desc->param_extent, slot);
    lh_store_stage(engine->store, unit->desc->store_group);
    unit->update.is_param_dirty =
        !param_is_due(engine, (uint32_t)(unit - engine->units), lh_core_step(engine));
    unit->update.is_done = true;
    engine->updates.done_count++;
    LH_ASSERT(engine->updates.done_count <= engine->updates.count);
}

/*
 * The bytes in a kept slab must have the checksums that the update computed: copy these to
 * `expected`, because the old ones no longer match.
 */
static void slab_keep(struct lh_engine *engine, struct lh_chunk *chunk)
{
    struct lh_slab *slab = &engine->slabs[chunk->slab];
    const struct lh_unit *unit = &engine->units[chunk->unit];
    LH_ASSERT(chunk->is_kept && chunk->slab == chunk->kept_slab);
    lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_LOADED);
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++) {
        struct lh_unit_state_place place = lh_unit_state_place(unit, i, chunk->first, chunk->count);
        if (place.bytes > 0)
            memcpy(slab->expected[i], lh_chunk_checksums(engine, unit, place.extent, place.offset),
                   lh_div_ceil(place.bytes, LH_CHECKSUM_BYTES) * sizeof(uint32_t));
    }
}

static void written(struct lh_engine *engine, struct lh_chunk *chunk)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, chunk->unit);
    bool is_flushing = chunk->is_flushing;
    LH_ASSERT(chunk->state == LH_CHUNK_STATE_WRITING && engine->updates.chunks_busy > 0);
    chunk->is_flushing = false;
    engine->updates.chunks_busy--;
    if (chunk->is_kept)
        slab_keep(engine, chunk);
    else
        lh_slab_clear(engine, &engine->slabs[chunk->slab]);
    if (is_flushing)
        return;
    LH_ASSERT(unit->update.chunks_written < unit->update.chunks_computed);
    if (++unit->update.chunks_written == unit->chunk_count)
        unit_written(engine, unit);
}

static void write_done(struct lh_engine *engine, struct lh_transfer *transfer)
{
    struct lh_slab *slab = &engine->slabs[transfer->slab];
    LH_ASSERT(slab->pending > 0 && !slab->is_lent);
    if (--slab->pending == 0)
        written(engine, &engine->chunks[slab->chunk]);
}

static void write_submit(struct lh_engine *engine, struct lh_slab *slab, uint32_t index,
                         struct lh_transfer transfer)
{
    const struct lh_chunk *chunk = &engine->chunks[slab->chunk];
    LH_ASSERT(index < LH_SLAB_TRANSFER_COUNT && !slab->is_lent);
    LH_ASSERT(chunk->state == LH_CHUNK_STATE_WRITING);
    transfer.source = &engine->transfers.store;
    transfer.done = write_done;
    transfer.kind = LH_IO_KIND_WRITE;
    transfer.priority = LH_PRIORITY_WRITE;
    transfer.unit = chunk->unit;
    transfer.slab = chunk->slab;
    transfer.slot =
        lh_store_write_slot(engine->store, engine->units[chunk->unit].desc->store_group);
    slab->transfers[index] = transfer;
    slab->pending++;
    lh_transfer_submit(engine, &slab->transfers[index]);
}

static void states_write(struct lh_engine *engine, struct lh_chunk *chunk, uint64_t step)
{
    struct lh_slab *slab = &engine->slabs[chunk->slab];
    const struct lh_unit *unit = &engine->units[chunk->unit];
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++) {
        struct lh_unit_state_place place = lh_unit_state_place(unit, i, chunk->first, chunk->count);
        if (place.bytes == 0)
            continue;
        write_submit(engine, slab, i,
                     (struct lh_transfer){
                         .link = LH_ENGINE_LINK_STATE_WRITE,
                         .step = step,
                         .extent = place.extent,
                         .offset = place.offset,
                         .bytes = place.bytes,
                         .buffer = lh_slab_array(slab, unit, i, chunk->count),
                     });
    }
    chunk->is_dirty = false;
}

void lh_write_back_chunk(struct lh_engine *engine, struct lh_chunk *chunk)
{
    struct lh_slab *slab = &engine->slabs[chunk->slab];
    const struct lh_unit *unit = &engine->units[chunk->unit];
    uint64_t param_bytes = lh_dtype_bytes(unit->desc->dtype);
    uint64_t step = lh_core_step(engine);
    LH_ASSERT(chunk->first + chunk->count <= unit->desc->elements);
    LH_ASSERT(chunk->computed_step == step && slab->pending == 0);
    LH_ASSERT(!chunk->is_flushing && engine->updates.chunks_busy > 0);
    lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_WRITING);
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++)
        slab->is_zero[i] = false;
    chunk->is_dirty = !is_due(engine, chunk, step);
    if (!chunk->is_dirty)
        states_write(engine, chunk, step);
    if (param_is_due(engine, chunk->unit, step))
        write_submit(engine, slab, LH_STATE_ARRAY_COUNT,
                     (struct lh_transfer){
                         .link = LH_ENGINE_LINK_PARAM_WRITE,
                         .step = step,
                         .extent = unit->desc->param_extent,
                         .offset = chunk->first * param_bytes,
                         .bytes = chunk->count * param_bytes,
                         .buffer = unit->memory + chunk->first * param_bytes,
                     });
    if (slab->pending == 0)
        written(engine, chunk);
}

/* Write the dirty states of a chunk. */
static void states_write_dirty(struct lh_engine *engine, struct lh_chunk *chunk, uint64_t step)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    LH_ASSERT(chunk->is_kept && !chunk->is_flushing);
    LH_ASSERT(chunk->state == LH_CHUNK_STATE_LOADED && engine->slabs[chunk->slab].pending == 0);
    lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_WRITING);
    chunk->is_flushing = true;
    engine->updates.chunks_busy++;
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++)
        lh_core_stats(engine, step)->planned_bytes[LH_ENGINE_LINK_STATE_WRITE] +=
            lh_unit_state_bytes(&unit->states[i], chunk->count);
    states_write(engine, chunk, step);
}

static void param_written(struct lh_engine *engine, struct lh_transfer *transfer)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, transfer->unit);
    LH_ASSERT(unit->update.is_flushing && engine->updates.chunks_busy > 0);
    unit->update.is_flushing = false;
    engine->updates.chunks_busy--;
}

/* Write all of P of a unit whose P is dirty. */
static void param_write_dirty(struct lh_engine *engine, struct lh_unit *unit, uint64_t step)
{
    LH_ASSERT(unit->state == LH_UNIT_STATE_READY && !unit->update.is_flushing);
    unit->update.is_param_dirty = false;
    unit->update.is_flushing = true;
    engine->updates.chunks_busy++;
    lh_core_stats(engine, step)->planned_bytes[LH_ENGINE_LINK_PARAM_WRITE] += unit->desc->bytes;
    unit->load = (struct lh_transfer){
        .source = &engine->transfers.store,
        .done = param_written,
        .kind = LH_IO_KIND_WRITE,
        .priority = LH_PRIORITY_WRITE,
        .link = LH_ENGINE_LINK_PARAM_WRITE,
        .unit = (uint32_t)(unit - engine->units),
        .slab = LH_CHUNK_NONE,
        .step = step,
        .extent = unit->desc->param_extent,
        .slot = lh_store_write_slot(engine->store, unit->desc->store_group),
        .bytes = unit->desc->bytes,
        .buffer = unit->memory,
    };
    lh_transfer_submit(engine, &unit->load);
}

bool lh_write_back_dirty(struct lh_engine *engine, uint64_t step)
{
    bool moved = false;
    for (uint32_t i = 0; i < engine->budget.kept_chunk_count; i++) {
        uint32_t chunk = engine->slabs[i].chunk;
        if (chunk == LH_CHUNK_NONE || !engine->chunks[chunk].is_dirty)
            continue;
        LH_ASSERT(engine->chunks[chunk].slab == i);
        states_write_dirty(engine, &engine->chunks[chunk], step);
        moved = true;
    }
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        if (!engine->units[i].update.is_param_dirty)
            continue;
        param_write_dirty(engine, lh_engine_unit_at(engine, i), step);
        moved = true;
    }
    return moved;
}
