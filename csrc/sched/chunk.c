/* See chunk.h. */
#include "sched/chunk.h"

#include <inttypes.h>
#include <string.h>

#include "sched/engine_private.h"

/* 1 / FIRST_DIVISOR of the chunks count as the first units': an embedding and a block or two. */
#define FIRST_DIVISOR 16
/* log2(LH_ADAM_STATES_BLOCK) */
#define BLOCK_SHIFT 6

_Static_assert(1 << BLOCK_SHIFT == LH_ADAM_STATES_BLOCK, "scales are per block");
_Static_assert(LH_ENGINE_PARAM_ALIGN % LH_ADAM_STATES_BLOCK == 0, "parameters begin at blocks");
_Static_assert(LH_ENGINE_ELEMENT_ALIGN % LH_ADAM_STATES_BLOCK == 0, "units are whole blocks");

void lh_chunk_state_set(struct lh_engine *engine, struct lh_chunk *chunk, enum lh_chunk_state state)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, chunk->unit);
    bool is_computed = chunk->computed_step == lh_core_step(engine);
    LH_ASSERT(lh_states_may(lh_states_chunk, (int)chunk->state, (int)state));
    if (chunk->state == LH_CHUNK_STATE_LOADED && !is_computed) {
        LH_ASSERT(unit->update.chunks_loaded > 0);
        LH_ASSERT(chunk->is_kept || unit->update.chunks_to_pass > 0);
        unit->update.chunks_loaded--;
        unit->update.chunks_to_pass -= !chunk->is_kept;
    }
    chunk->state = state;
    if (state == LH_CHUNK_STATE_LOADED && !is_computed) {
        unit->update.chunks_loaded++;
        unit->update.chunks_to_pass += !chunk->is_kept;
        LH_ASSERT(unit->update.chunks_loaded <= unit->chunk_count);
        LH_ASSERT(unit->update.chunks_to_pass <= unit->update.chunks_loaded);
    }
}

void lh_chunk_recount(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        engine->units[i].update.chunks_loaded = 0;
        engine->units[i].update.chunks_to_pass = 0;
        engine->units[i].update.chunk_next = 0;
    }
    for (uint32_t i = 0; i < engine->budget.slab_count; i++) {
        if (engine->slabs[i].chunk == LH_CHUNK_NONE || engine->slabs[i].is_lent)
            continue;
        LH_ASSERT(engine->slabs[i].chunk < engine->chunk_count);
        const struct lh_chunk *chunk = &engine->chunks[engine->slabs[i].chunk];
        if (chunk->state != LH_CHUNK_STATE_LOADED || chunk->computed_step > engine->step)
            continue;
        engine->units[chunk->unit].update.chunks_loaded++;
        engine->units[chunk->unit].update.chunks_to_pass += !chunk->is_kept;
    }
    engine->updates.ahead_first = 0;
}

uint32_t *lh_chunk_checksums(struct lh_engine *engine, const struct lh_unit *unit, uint32_t extent,
                             uint64_t offset)
{
    uint32_t count = 0;
    uint32_t slot = lh_store_write_slot(engine->store, unit->desc->store_group);
    uint32_t *checksums = lh_store_checksums(engine->store, extent, slot, &count);
    LH_ASSERT(lh_is_aligned(offset, LH_CHECKSUM_BYTES) && offset / LH_CHECKSUM_BYTES < count);
    return checksums + offset / LH_CHECKSUM_BYTES;
}

static void read_done(struct lh_engine *engine, struct lh_transfer *transfer)
{
    struct lh_slab *slab = &engine->slabs[transfer->slab];
    LH_ASSERT(slab->pending > 0 && !slab->is_lent);
    if (--slab->pending == 0)
        lh_chunk_state_set(engine, &engine->chunks[slab->chunk], LH_CHUNK_STATE_LOADED);
}

void lh_chunk_read(struct lh_engine *engine, struct lh_chunk *chunk, uint32_t slab_index)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    LH_ASSERT(slab_index < engine->budget.slab_count);
    LH_ASSERT(chunk->state == LH_CHUNK_STATE_IDLE);
    struct lh_slab *slab = &engine->slabs[slab_index];
    uint32_t slot = lh_store_read_slot(engine->store, unit->desc->store_group);
    lh_slab_give(engine, slab, chunk);
    lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_READING);
    if (chunk->read_step != lh_core_step(engine))
        chunk->read_bytes = 0;
    chunk->read_step = lh_core_step(engine);
    slab->pending = 0;
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++) {
        struct lh_unit_state_place place = lh_unit_state_place(unit, i, chunk->first, chunk->count);
        uint32_t count = 0;
        slab->is_zero[i] = place.bytes > 0 && lh_store_is_zero(engine->store, place.extent, slot);
        if (place.bytes == 0 || slab->is_zero[i])
            continue;
        const uint32_t *checksums = lh_store_checksums(engine->store, place.extent, slot, &count);
        LH_ASSERT(lh_div_ceil(place.offset + place.bytes, LH_CHECKSUM_BYTES) <= count);
        memcpy(slab->expected[i], checksums + place.offset / LH_CHECKSUM_BYTES,
               lh_div_ceil(place.bytes, LH_CHECKSUM_BYTES) * sizeof(*checksums));
        slab->transfers[i] = (struct lh_transfer){
            .source = &engine->transfers.store,
            .done = read_done,
            .kind = LH_IO_KIND_READ,
            .priority = LH_PRIORITY_STATE,
            .link = LH_ENGINE_LINK_STATE_READ,
            .unit = chunk->unit,
            .slab = slab_index,
            .step = lh_core_step(engine),
            .extent = place.extent,
            .slot = slot,
            .offset = place.offset,
            .bytes = place.bytes,
            .buffer = lh_slab_array(slab, unit, i, chunk->count),
        };
        slab->pending++;
        chunk->read_bytes += place.bytes;
        lh_transfer_submit(engine, &slab->transfers[i]);
    }
    lh_update_plan_reread(engine, chunk);
    LH_FEATURE_CALL(engine, chunk_read, chunk);
    if (slab->pending == 0)
        lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_LOADED);
}

void lh_chunk_reads_more(struct lh_engine *engine, struct lh_chunk *chunk,
                         const struct lh_transfer *transfer)
{
    struct lh_slab *slab = &engine->slabs[chunk->slab];
    struct lh_transfer *more = &slab->transfers[LH_STATE_ARRAY_COUNT];
    LH_ASSERT(transfer->kind == LH_IO_KIND_READ);
    LH_ASSERT(chunk->state == LH_CHUNK_STATE_READING || chunk->state == LH_CHUNK_STATE_LOADED);
    *more = *transfer;
    more->done = read_done;
    more->unit = chunk->unit;
    more->slab = chunk->slab;
    slab->pending++;
    if (chunk->state != LH_CHUNK_STATE_READING)
        lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_READING);
    lh_transfer_submit(engine, more);
}

void lh_chunk_zeros_fill(struct lh_slab *slab)
{
    const struct lh_chunk *chunk = &slab->engine->chunks[slab->chunk];
    const struct lh_unit *unit = &slab->engine->units[chunk->unit];
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++) {
        if (slab->is_zero[i])
            memset(lh_slab_array(slab, unit, i, chunk->count), 0,
                   lh_unit_state_bytes(&unit->states[i], chunk->count));
    }
}

/* Runs on a worker: update a chunk in its slab. */
static void update_run(struct lh_exec_job *job)
{
    struct lh_slab *slab = job->context;
    lh_chunk_zeros_fill(slab);
    slab->result = lh_adam_chunk_update(NULL, &slab->adam, &slab->mismatch);
}

uint32_t lh_chunk_segments_fill(struct lh_engine *engine, const struct lh_chunk *chunk,
                                struct lh_adam_segment *segments)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    const struct lh_adam_hyper *hypers = engine->hypers[lh_core_step(engine) % 2];
    const uint8_t *read_gradients = engine->slabs[chunk->slab].gradients;
    uint32_t count = 0;
    for (uint32_t i = 0; i < unit->desc->param_count; i++) {
        uint32_t index = unit->desc->param_first + i;
        const struct lh_engine_param *param = &engine->params[index];
        const struct lh_gradient *gradient = &engine->gradients[index];
        uint64_t first = lh_max_u64(param->first, chunk->first);
        uint64_t end = lh_min_u64(param->first + param->count, chunk->first + chunk->count);
        if (first >= end || !gradient->pointer)
            continue;
        uint64_t read_offset = (first - chunk->first) * lh_dtype_bytes(gradient->dtype);
        LH_ASSERT(count < unit->desc->param_count);
        bool is_given = lh_unit_is_given(unit); /* another process has the sums or factors */
        LH_ASSERT(is_given || !lh_rules[unit->desc->rule].has_rows || gradient->row_sums);
        LH_ASSERT(is_given || !lh_rules[unit->desc->rule].has_factors || gradient->factors);
        struct lh_adam_scalars scalars = lh_rules[unit->desc->rule].scalars(
            &hypers[param->group], engine->param_steps[index] + 1,
            engine->gradient_scales[lh_core_step(engine) % 2]);
        if (param->matrix_rows > 0)
            scalars.step_size = (float)(hypers[param->group].lr * param->lr_ratio);
        segments[count] = (struct lh_adam_segment){
            .first = first - chunk->first,
            .count = end - first,
            .gradient = read_gradients ? read_gradients + read_offset
                                       : lh_gradient_at(engine, index, first),
            .gradient_dtype = gradient->dtype,
            .scalars = scalars,
            .param_first = first - param->first,
            .row_sums = gradient->row_sums,
            .row_elements = param->row_elements,
            .update = gradient->update ? gradient->update + (first - param->first) : NULL,
            .random = {LH_ADAM_SEED, param->number, (uint32_t)lh_core_step(engine)},
        };
        if (gradient->factors) {
            segments[count].factors = *gradient->factors;
            segments[count].scalars.step_size = (float)gradient->factors->step_size;
        }
        count++;
    }
    return count;
}

static void mismatch_fail(struct lh_engine *engine, const struct lh_slab *slab)
{
    const struct lh_chunk *chunk = &engine->chunks[slab->chunk];
    const struct lh_unit *unit = &engine->units[chunk->unit];
    const struct lh_adam_mismatch *bad = &slab->mismatch;
    bool has_master = unit->desc->dtype == LH_DTYPE_F16;
    bool is_paired = unit->desc->states == LH_ADAM_STATES_4BIT;
    const char *const names[] = {"?",
                                 has_master ? "fp32 master" : "residual",
                                 is_paired ? "moments" : "first moment",
                                 "second moment",
                                 lh_rules[unit->desc->rule].has_rows ? "second moment of rows"
                                                                     : "moments' scales",
                                 "average"};
    uint32_t array = (uint32_t)bad->array - LH_ADAM_ARRAY_RESIDUAL;
    struct lh_unit_state_place place = lh_unit_state_place(unit, array, chunk->first, chunk->count);
    uint64_t offset = place.offset + bad->block * LH_CHECKSUM_BYTES;
    uint32_t slot = lh_store_read_slot(engine->store, unit->desc->store_group);
    struct lh_store_piece piece = {0};
    struct lh_error err = {0};
    int count = lh_store_map(engine->store, place.extent, slot, offset, LH_BLOCK_BYTES, &piece, 1);
    LH_ASSERT(count == 1);
    lh_error_set(&err, -EILSEQ,
                 "unit %u: its %s, read from %s, has a wrong checksum at byte %" PRIu64
                 " (file offset %" PRIu64 "): %08x, expected %08x",
                 chunk->unit, names[bad->array],
                 lh_store_file_path(engine->store, piece.file_index), offset, piece.file_offset,
                 bad->actual, bad->expected);
    lh_core_fail(engine, &err);
}

/*
 * [Note: Refused NaNs] Nothing of the step is committed after this, because the engine has failed.
 * Commits of earlier steps are not lost: no update is computed while one is under way.
 */
static void nan_say(const struct lh_engine *engine, const struct lh_slab *slab,
                    struct lh_error *err)
{
    const struct lh_chunk *chunk = &engine->chunks[slab->chunk];
    const struct lh_unit *unit = &engine->units[chunk->unit];
    LH_ASSERT(slab->nan_segment < slab->adam.segment_count);
    uint64_t first = chunk->first + slab->segments[slab->nan_segment].first;
    uint32_t param = unit->desc->param_first;
    while (first >= engine->params[param].first + engine->params[param].count)
        param++;
    LH_ASSERT(param < unit->desc->param_first + unit->desc->param_count);
    lh_error_set(err, -EDOM,
                 "param %u has a gradient that is not finite (NaN or infinity) in step %" PRIu64
                 ", or was NaN before it: the update made it NaN and was discarded",
                 param, lh_core_step(engine));
}

/* Whether the failure of an update that made a NaN waits; otherwise the engine has failed. */
static bool nan_waits(struct lh_engine *engine, const struct lh_slab *slab)
{
    struct lh_error err = {0};
    nan_say(engine, slab, &err);
    bool waits = LH_FEATURE_ANY(engine, refusal_waits, &err);
    if (!waits)
        lh_core_fail(engine, &err);
    return waits;
}

static void computed(struct lh_engine *engine, struct lh_job *job)
{
    struct lh_slab *slab = job->exec.context;
    struct lh_chunk *chunk = &engine->chunks[slab->chunk];
    struct lh_unit *unit = lh_engine_unit_at(engine, chunk->unit);
    LH_ASSERT(!slab->is_lent && chunk->slab == (uint32_t)(slab - engine->slabs));
    lh_slab_job_account(engine, job, LH_ENGINE_TRACE_UPDATE);
    if (slab->result < 0) {
        mismatch_fail(engine, slab);
        return;
    }
    if (slab->nan_segment != LH_ADAM_SEGMENT_NONE && !nan_waits(engine, slab))
        return;
    bool gradients_stay = LH_FEATURE_ANY(engine, gradients_stay, unit);
    if (!gradients_stay)
        LH_FEATURE_CALL(engine, chunk_consumed, chunk);
    lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_COMPUTED);
    LH_ASSERT(unit->update.chunks_computed < unit->chunk_count);
    if (++unit->update.chunks_computed == unit->chunk_count) {
        /* The unit's bytes in memory are now those for the next step; release its gradients. */
        LH_ASSERT(unit->state == LH_UNIT_STATE_UPDATING && unit->update.is_counted);
        if (!gradients_stay)
            lh_gradient_release_unit(engine, unit);
        LH_FEATURE_CALL(engine, unit_computed, unit);
        lh_unit_make_ready(engine, unit);
    }
    bool may_write = LH_FEATURE_ALL(engine, chunk_may_write, chunk);
    if (may_write)
        lh_write_back_chunk(engine, chunk);
}

/* Describe a chunk in its slab to the kernel of its rule. */
static void adam_fill(struct lh_engine *engine, const struct lh_chunk *chunk, struct lh_slab *slab)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    uint64_t param_offset = chunk->first * lh_dtype_bytes(unit->desc->dtype);
    bool has_rows = lh_rules[unit->desc->rule].has_rows;
    LH_ASSERT(chunk->first + chunk->count <= unit->desc->elements);
    uint8_t *arrays[LH_STATE_ARRAY_COUNT] = {NULL};
    const uint32_t *expected[LH_STATE_ARRAY_COUNT] = {NULL};
    uint32_t *checksums[LH_STATE_ARRAY_COUNT] = {NULL};
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++) {
        struct lh_unit_state_place place = lh_unit_state_place(unit, i, chunk->first, chunk->count);
        if (place.bytes == 0)
            continue;
        arrays[i] = lh_slab_array(slab, unit, i, chunk->count);
        expected[i] = engine->opts.verify && !slab->is_zero[i] ? slab->expected[i] : NULL;
        checksums[i] = lh_chunk_checksums(engine, unit, place.extent, place.offset);
    }
    slab->adam = (struct lh_adam_chunk){
        .param = unit->memory + param_offset,
        .residual = arrays[0],
        .moment1 = arrays[1],
        .moment2 = arrays[2],
        .scales = has_rows ? NULL : (struct lh_adam_scales *)arrays[3],
        .rows = has_rows ? (struct lh_adam_rows *)arrays[3] : NULL,
        .average = (float *)arrays[4],
        .count = chunk->count,
        .param_dtype = unit->desc->dtype,
        .states = unit->desc->states,
        .rule = unit->desc->rule,
        .segments = slab->segments,
        .segment_count = lh_chunk_segments_fill(engine, chunk, slab->segments),
        .residual_expected = expected[0],
        .moment1_expected = expected[1],
        .moment2_expected = expected[2],
        .scales_expected = expected[3],
        .average_expected = expected[4],
        .param_checksums = lh_chunk_checksums(engine, unit, unit->desc->param_extent, param_offset),
        .residual_checksums = checksums[0],
        .moment1_checksums = checksums[1],
        .moment2_checksums = checksums[2],
        .scales_checksums = checksums[3],
        .average_checksums = checksums[4],
        .nan_segment = engine->opts.accept_nan ? NULL : &slab->nan_segment,
    };
    slab->nan_segment = LH_ADAM_SEGMENT_NONE;
}

void lh_chunk_compute(struct lh_engine *engine, struct lh_chunk *chunk)
{
    LH_ASSERT(chunk->state == LH_CHUNK_STATE_LOADED && chunk->slab < engine->budget.slab_count);
    struct lh_slab *slab = &engine->slabs[chunk->slab];
    const struct lh_unit *unit = &engine->units[chunk->unit];
    uint64_t work_bytes = 2 * chunk->count * lh_dtype_bytes(unit->desc->dtype);
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++)
        work_bytes += 2 * lh_unit_state_bytes(&unit->states[i], chunk->count);
    work_bytes += (uint64_t)((double)unit->desc->work_bytes * (double)chunk->count /
                             (double)unit->desc->elements);
    LH_ASSERT(unit->state == LH_UNIT_STATE_UPDATING);
    LH_ASSERT(chunk->computed_step < lh_core_step(engine) && slab->pending == 0);
    adam_fill(engine, chunk, slab);
    slab->job = (struct lh_job){
        .exec = {.run = update_run, .context = slab, .work_bytes = work_bytes},
        .done = computed,
    };
    LH_FEATURE_CALL(engine, chunk_job, chunk, &slab->job.exec);
    lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_COMPUTING);
    chunk->computed_step = lh_core_step(engine);
    engine->updates.chunks_busy++;
    lh_job_submit(engine, &slab->job);
}

/*
 * The number of chunks before index, among those with states, that keep their slabs: those of the
 * first units, which are updated last while the next forward waits for them, and further chunks
 * spread evenly over the model, so that the traffic of chunks without slabs of their own is spread
 * over backward.
 */
static uint32_t kept_before(const struct lh_engine *engine, uint32_t index)
{
    uint64_t count = engine->budget.state_chunk_count;
    uint64_t kept_count = engine->budget.kept_chunk_count;
    uint64_t first_count = lh_min_u64(count / FIRST_DIVISOR, kept_count);
    LH_ASSERT(index <= count && kept_count <= count);
    if (index <= first_count)
        return index;
    return (uint32_t)(first_count +
                      (index - first_count) * (kept_count - first_count) / (count - first_count));
}

/* Describe the arrays of a unit's states. Returns whether it has any. */
static bool states_describe(struct lh_unit *unit)
{
    const struct lh_engine_unit *desc = unit->desc;
    const struct lh_rule_row *rule = &lh_rules[desc->rule];
    bool has_residual = desc->residual_extent != LH_ENGINE_EXTENT_NONE;
    bool has_moments = !lh_unit_is_given(unit);
    uint64_t moment1_bytes =
        has_moments && rule->has_moment1 ? lh_adam_moment1_bytes(desc->states) : 0;
    uint64_t moment2_bytes =
        has_moments && rule->has_moment2 ? lh_adam_moment2_bytes(desc->states) : 0;
    uint64_t block_bytes = has_moments ? lh_adam_block_bytes(desc->rule, desc->states) : 0;
    bool has_states = false;
    unit->states[0] = (struct lh_unit_state_array){
        desc->residual_extent, has_residual ? lh_adam_residual_bytes(desc->dtype) : 0, 0};
    unit->states[1] = (struct lh_unit_state_array){desc->moment1_extent, moment1_bytes, 0};
    unit->states[2] = (struct lh_unit_state_array){desc->moment2_extent, moment2_bytes, 0};
    unit->states[3] = (struct lh_unit_state_array){desc->scales_extent, block_bytes, BLOCK_SHIFT};
    unit->states[4] = (struct lh_unit_state_array){desc->average_extent,
                                                   desc->average_extent ? sizeof(float) : 0, 0};
    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++) {
        LH_ASSERT(desc->elements == 0 || unit->states[i].bytes == 0 ||
                  unit->states[i].extent != LH_ENGINE_EXTENT_NONE);
        has_states |= unit->states[i].bytes > 0;
    }
    return has_states;
}

int lh_chunk_create(struct lh_engine *engine, struct lh_error *err)
{
    uint64_t elements_max = engine->budget.chunk_elements;
    uint64_t count = 0;
    uint32_t state_count = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        count += lh_div_ceil(engine->units[i].desc->elements, elements_max);
    LH_ASSERT(count == engine->budget.chunk_count);
    engine->chunks = lh_alloc_zeroed(engine->alloc, lh_max_u64(count, 1), sizeof(*engine->chunks));
    if (!engine->chunks)
        return lh_error_set(err, -ENOMEM, "no memory for %" PRIu64 " chunks", count);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        bool has_states = states_describe(unit);
        unit->chunk_first = engine->chunk_count;
        for (uint64_t first = 0; first < unit->desc->elements; first += elements_max) {
            uint32_t before = state_count;
            state_count += has_states;
            engine->chunks[engine->chunk_count++] = (struct lh_chunk){
                .unit = i,
                .slab = LH_CHUNK_NONE,
                .first = first,
                .count = lh_min_u64(elements_max, unit->desc->elements - first),
                .is_kept = kept_before(engine, state_count) > kept_before(engine, before),
                .kept_slab = kept_before(engine, before),
            };
            unit->chunk_count++;
        }
    }
    LH_ASSERT(engine->chunk_count == engine->budget.chunk_count);
    LH_ASSERT(state_count == engine->budget.state_chunk_count);
    return 0;
}
