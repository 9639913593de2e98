/*
 * Updates: gradients in, chunks of R, M and V read, AdamW on a worker, P, R, M and V written.
 *
 * Reads go ahead of gradients, in the order in which the last step updated its units; a slab that
 * holds a chunk read ahead is taken back when a unit that has its gradients needs one. Writes have
 * the lowest priority and the slabs are few, so reads, arithmetic and writes of successive chunks
 * overlap, and a write is issued behind the next chunk's read.
 * Source: LoHan IV-C fig. 3b, Fuyou 4.3.
 */
#include <inttypes.h>
#include <string.h>

#include "sched/engine_private.h"

uint8_t *lh_slab_array(const struct lh_slab *slab, const struct lh_unit *unit, uint32_t array,
                       uint64_t count)
{
    uint64_t offset = 0;
    for (uint32_t i = 0; i < array; i++)
        offset += count * lh_state_element_bytes(unit, i);
    return slab->memory + offset;
}

void lh_update_gradient(struct lh_engine *engine, uint32_t param, const void *pointer,
                        enum lh_dtype dtype)
{
    LH_ASSERT(engine->step_state == LH_STEP_STATE_OPEN); /* lh_engine_gradient waits for that */
    struct lh_gradient *gradient = &engine->gradients[param];
    struct lh_unit *unit = lh_engine_unit_at(engine, engine->params[param].unit);
    LH_ASSERT(gradient->pointer == NULL && !unit->update_is_queued);
    if (unit->spill_state != LH_SPILL_STATE_NONE) {
        struct lh_error err = {0};
        lh_error_set(&err, -EINVAL,
                     "a gradient of unit %u came after the norm of all gradients was asked",
                     engine->params[param].unit);
        lh_engine_fail(engine, &err);
        return;
    }
    gradient->pointer = pointer;
    gradient->dtype = dtype;
    if (engine->gradient_unit_count == 0)
        lh_split_gradient(engine);
    if (unit->gradient_count++ == 0)
        engine->gradient_unit_count++;
    unit->gradient_bytes += engine->params[param].count * lh_dtype_bytes(dtype);
    if (lh_landing_is_used(engine))
        lh_landing_posted(engine, param);
    LH_ASSERT(unit->gradient_count <= unit->desc.param_count);
    lh_norm_consider(engine, unit);
    lh_update_consider(engine, engine->params[param].unit);
}

void lh_update_consider(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    if (unit->gradient_count == 0 || unit->update_is_queued)
        return;
    bool is_closed = engine->step_state == LH_STEP_STATE_CLOSED;
    if (!is_closed && engine->step_state != LH_STEP_STATE_OPEN)
        return;
    bool is_complete =
        unit->gradient_count == unit->desc.param_count && atomic_load(&unit->handles) == 0;
    lh_spill_consider(engine, index);
    bool is_due = unit->is_deferred ? unit->is_released : is_closed || is_complete;
    /* Behind the close pins decide: whoever freed the last lend may not have said so yet. */
    bool is_used = lh_unit_pins(unit) > 0 || (!is_closed && unit->use_is_open);
    if (!is_due || is_used || !lh_device_make_old(engine, unit))
        return;
    lh_region_event(engine, index, LH_RESIDENCY_EVENT_UPDATE);
    unit->update_is_queued = true;
    LH_ASSERT(engine->update_count < engine->opts.unit_count);
    engine->update_queue[engine->update_count++] = index;
    if (unit->spill_state != LH_SPILL_STATE_NONE)
        return; /* their gradients are counted by their way to SSD */
    uint64_t held = atomic_fetch_add(&engine->update_gradient_bytes, unit->gradient_bytes) +
                    unit->gradient_bytes;
    struct lh_engine_step_stats *stats = lh_step_stats(engine, lh_step_current(engine));
    stats->gradient_bytes_max = lh_max_u64(stats->gradient_bytes_max, held);
}

void lh_update_consider_all(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        lh_update_consider(engine, i);
}

static void chunk_loaded(struct lh_engine *engine, struct lh_chunk *chunk)
{
    LH_ASSERT(chunk->state == LH_CHUNK_STATE_READING);
    lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_LOADED);
}

/* Read R, M and V of a chunk into its slab; what was never written is zeros and is not read. */
void lh_chunk_read(struct lh_engine *engine, struct lh_chunk *chunk, uint32_t slab_index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, chunk->unit);
    struct lh_slab *slab = &engine->slabs[slab_index];
    uint32_t slot = lh_store_read_slot(engine->store, unit->desc.store_group);
    LH_ASSERT(slab->chunk == LH_CHUNK_NONE && chunk->state == LH_CHUNK_STATE_IDLE);
    slab->chunk = (uint32_t)(chunk - engine->chunks);
    chunk->slab = slab_index;
    lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_READING);
    if (chunk->read_step != lh_step_current(engine))
        chunk->read_bytes = 0;
    chunk->read_step = lh_step_current(engine);
    slab->pending = 0;
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++) {
        uint64_t element_bytes = lh_state_element_bytes(unit, i);
        slab->is_zero[i] = false;
        if (element_bytes == 0)
            continue;
        uint32_t extent = lh_state_extent(unit, i);
        slab->is_zero[i] = lh_store_is_zero(engine->store, extent, slot);
        if (slab->is_zero[i])
            continue;
        uint64_t offset = chunk->first * element_bytes;
        uint64_t bytes = chunk->count * element_bytes;
        uint32_t count = 0;
        const uint32_t *checksums = lh_store_checksums(engine->store, extent, slot, &count);
        memcpy(slab->expected[i], checksums + offset / LH_CHECKSUM_BYTES,
               lh_div_ceil(bytes, LH_CHECKSUM_BYTES) * sizeof(*checksums));
        slab->transfers[i] = (struct lh_transfer){
            .kind = LH_IO_KIND_READ,
            .priority = LH_PRIORITY_STATE,
            .link = LH_ENGINE_LINK_STATE_READ,
            .unit = chunk->unit,
            .slab = slab_index,
            .step = lh_step_current(engine),
            .extent = extent,
            .slot = slot,
            .offset = offset,
            .bytes = bytes,
            .buffer = lh_slab_array(slab, unit, i, chunk->count),
        };
        slab->pending++;
        chunk->read_bytes += bytes;
        lh_transfer_submit(engine, &slab->transfers[i]);
    }
    lh_update_plan_reread(engine, chunk);
    if (unit->spill_state == LH_SPILL_STATE_DONE)
        lh_spill_read(engine, chunk);
    if (slab->pending == 0)
        chunk_loaded(engine, chunk);
}

/* On a worker. */
static void update_run(struct lh_exec_job *job)
{
    struct lh_slab *slab = job->context;
    const struct lh_chunk *chunk = &slab->engine->chunks[slab->chunk];
    const struct lh_unit *unit = &slab->engine->units[chunk->unit];
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++) {
        if (slab->is_zero[i])
            memset(lh_slab_array(slab, unit, i, chunk->count), 0,
                   chunk->count * lh_state_element_bytes(unit, i));
    }
    slab->result = lh_adam_chunk_update(&slab->adam, &slab->mismatch);
}

/* The parameters of a chunk that have gradients, with their scalars of this step. */
static uint32_t segments_fill(struct lh_engine *engine, const struct lh_chunk *chunk,
                              struct lh_adam_segment *segments)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    const struct lh_adam_hyper *hypers = engine->hypers[lh_step_current(engine) % 2];
    const struct lh_slab *slab = &engine->slabs[chunk->slab];
    const uint8_t *read_gradients =
        slab->has_gradients ? lh_spill_gradients(slab, unit, chunk) : NULL;
    uint32_t count = 0;
    for (uint32_t i = 0; i < unit->desc.param_count; i++) {
        uint32_t index = unit->desc.param_first + i;
        const struct lh_engine_param *param = &engine->params[index];
        const struct lh_gradient *gradient = &engine->gradients[index];
        uint64_t first = lh_max_u64(param->first, chunk->first);
        uint64_t end = lh_min_u64(param->first + param->count, chunk->first + chunk->count);
        if (first >= end || !gradient->pointer)
            continue;
        const uint8_t *bytes = read_gradients ? read_gradients + (first - chunk->first) *
                                                                     lh_dtype_bytes(gradient->dtype)
                                              : lh_landing_bytes(engine, index, first);
        segments[count++] = (struct lh_adam_segment){
            .first = first - chunk->first,
            .count = end - first,
            .gradient = bytes,
            .gradient_dtype = gradient->dtype,
            .scalars = lh_adam_scalars_make(&hypers[param->group], engine->param_steps[index] + 1,
                                            engine->gradient_scales[lh_step_current(engine) % 2]),
        };
    }
    return count;
}

uint32_t *lh_chunk_checksums(struct lh_engine *engine, const struct lh_unit *unit, uint32_t extent,
                             uint64_t offset)
{
    uint32_t count = 0;
    uint32_t slot = lh_store_write_slot(engine->store, unit->desc.store_group);
    uint32_t *checksums = lh_store_checksums(engine->store, extent, slot, &count);
    LH_ASSERT(lh_is_aligned(offset, LH_CHECKSUM_BYTES) && offset / LH_CHECKSUM_BYTES < count);
    return checksums + offset / LH_CHECKSUM_BYTES;
}

void lh_chunk_compute(struct lh_engine *engine, struct lh_chunk *chunk)
{
    struct lh_slab *slab = &engine->slabs[chunk->slab];
    struct lh_unit *unit = lh_engine_unit_at(engine, chunk->unit);
    uint64_t param_bytes = lh_dtype_bytes(unit->desc.dtype);
    uint64_t residual_bytes = lh_state_element_bytes(unit, 0);
    bool has_residual = residual_bytes > 0;
    bool verify = engine->opts.verify;
    uint64_t first = chunk->first;
    uint8_t *arrays[LH_STATE_ARRAY_COUNT];
    const uint32_t *expected[LH_STATE_ARRAY_COUNT];
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++) {
        arrays[i] = lh_slab_array(slab, unit, i, chunk->count);
        expected[i] = verify && !slab->is_zero[i] ? slab->expected[i] : NULL;
    }
    slab->adam = (struct lh_adam_chunk){
        .param = engine->region + unit->offset + first * param_bytes,
        .residual = has_residual ? arrays[0] : NULL,
        .moment1 = (float *)arrays[1],
        .moment2 = (float *)arrays[2],
        .count = chunk->count,
        .param_dtype = unit->desc.dtype,
        .segments = slab->segments,
        .segment_count = segments_fill(engine, chunk, slab->segments),
        .residual_expected = has_residual ? expected[0] : NULL,
        .moment1_expected = expected[1],
        .moment2_expected = expected[2],
        .param_checksums =
            lh_chunk_checksums(engine, unit, unit->desc.param_extent, first * param_bytes),
        .residual_checksums = has_residual
                                  ? lh_chunk_checksums(engine, unit, unit->desc.residual_extent,
                                                       first * residual_bytes)
                                  : NULL,
        .moment1_checksums = lh_chunk_checksums(engine, unit, unit->desc.moment1_extent, first * 4),
        .moment2_checksums = lh_chunk_checksums(engine, unit, unit->desc.moment2_extent, first * 4),
    };
    slab->job = (struct lh_exec_job){
        .run = update_run,
        .context = slab,
        .work_bytes = chunk->count * (2 * param_bytes + 16 + 2 * residual_bytes),
    };
    lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_COMPUTING);
    chunk->computed_step = lh_step_current(engine);
    engine->chunks_busy++;
    lh_job_submit(engine, &slab->job);
}

static void mismatch_fail(struct lh_engine *engine, const struct lh_slab *slab)
{
    const struct lh_chunk *chunk = &engine->chunks[slab->chunk];
    const struct lh_unit *unit = &engine->units[chunk->unit];
    const struct lh_adam_mismatch *bad = &slab->mismatch;
    bool has_master = unit->desc.dtype == LH_DTYPE_F16;
    const char *const names[] = {"?", has_master ? "fp32 master" : "residual", "first moment",
                                 "second moment"};
    uint32_t array = (uint32_t)bad->array - LH_ADAM_ARRAY_RESIDUAL;
    uint64_t offset =
        chunk->first * lh_state_element_bytes(unit, array) + bad->block * LH_CHECKSUM_BYTES;
    uint32_t slot = lh_store_read_slot(engine->store, unit->desc.store_group);
    struct lh_store_piece piece = {0};
    struct lh_error err = {0};
    int count = lh_store_map(engine->store, lh_state_extent(unit, array), slot, offset,
                             LH_BLOCK_BYTES, &piece, 1);
    LH_ASSERT(count == 1);
    lh_error_set(&err, -EILSEQ,
                 "unit %u: its %s, read from %s, has a wrong checksum at byte %" PRIu64
                 " (file offset %" PRIu64 "): %08x, expected %08x",
                 chunk->unit, names[bad->array],
                 lh_store_file_path(engine->store, piece.file_index), offset, piece.file_offset,
                 bad->actual, bad->expected);
    lh_engine_fail(engine, &err);
}

/*
 * All chunks of a unit are computed: its bytes in memory are the next step's, its gradients are
 * free.
 */
static void unit_computed(struct lh_engine *engine, struct lh_unit *unit)
{
    for (uint32_t i = 0; i < unit->desc.param_count; i++) {
        struct lh_gradient *gradient = &engine->gradients[unit->desc.param_first + i];
        atomic_store(&gradient->is_held, false);
    }
    atomic_fetch_sub(&engine->update_gradient_bytes, unit->gradient_bytes);
    lh_unit_make_ready(engine, unit);
    lh_engine_notify(engine);
}

/* Writes begin when nothing is computed any more. */
static void naive_write(struct lh_engine *engine)
{
    const struct lh_slab *slabs = engine->slabs;
    for (uint32_t i = 0; i < engine->budget.slab_count; i++) {
        if (slabs[i].chunk != LH_CHUNK_NONE &&
            engine->chunks[slabs[i].chunk].state == LH_CHUNK_STATE_COMPUTING)
            return;
    }
    for (uint32_t i = 0; i < engine->budget.slab_count; i++) {
        if (slabs[i].chunk != LH_CHUNK_NONE &&
            engine->chunks[slabs[i].chunk].state == LH_CHUNK_STATE_COMPUTED)
            lh_chunk_write(engine, &engine->chunks[slabs[i].chunk]);
    }
}

void lh_update_job_done(struct lh_engine *engine, struct lh_slab *slab)
{
    struct lh_chunk *chunk = &engine->chunks[slab->chunk];
    struct lh_unit *unit = lh_engine_unit_at(engine, chunk->unit);
    if (slab->result < 0) {
        mismatch_fail(engine, slab);
        return;
    }
    lh_landing_release(engine, chunk);
    lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_COMPUTED);
    if (++unit->chunks_computed == unit->chunk_count)
        unit_computed(engine, unit);
    if (engine->opts.schedule == LH_ENGINE_SCHEDULE_NAIVE)
        naive_write(engine);
    else
        lh_chunk_write(engine, chunk);
}

void lh_update_transfer_done(struct lh_engine *engine, struct lh_transfer *transfer)
{
    struct lh_slab *slab = &engine->slabs[transfer->slab];
    struct lh_chunk *chunk = &engine->chunks[slab->chunk];
    if (slab->is_spill) {
        lh_spill_written(engine, slab);
        return;
    }
    LH_ASSERT(slab->pending > 0);
    if (--slab->pending > 0)
        return;
    if (chunk->state == LH_CHUNK_STATE_READING) {
        chunk_loaded(engine, chunk);
        return;
    }
    LH_ASSERT(chunk->state == LH_CHUNK_STATE_WRITING);
    lh_chunk_written(engine, chunk);
}
