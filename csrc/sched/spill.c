/*
 * Gradients that wait for the step's close on SSD, where main memory has no room for them.
 *
 * Spilled gradients lie where the unit's next parameters will be: in the slot of P that no commit
 * needs until the update has written it, each element at the same place. So spilled gradients need
 * no extra space, and chunk i of P may be written as soon as chunk i of the gradients has been
 * read.
 *
 *      NONE --[all gradients are here]--> RUNNING --[all chunks written]--> DONE
 *                                          per chunk: gather into a slab (a worker) -> write
 *      update: per chunk: read R, M, V and the gradients into a slab -> AdamW -> write P, R, M, V
 *
 * Nothing is rounded: gradients have the parameters' dtype. Their checksums are stored as those of
 * P's write slot until the update replaces them.
 *
 * [Note: Gradients apart] If a step may be repeated (repeat.c), its updates write P before it is
 * known whether the gradients are needed again. They then lie in a store of their own, which no
 * commit knows. The update does not read them from there: it runs while they are written, and they
 * are released from memory once both are done. At the close of a step that is not repeated, what
 * is not written yet stays so. If the step's updates wait, its gradients wait as described above.
 *
 * Source: Fuyou 4.3 (gradients leave the device as they appear); the reuse of P's slot is ours.
 */
#include <inttypes.h>
#include <string.h>

#include "base/crc32c.h"
#include "sched/engine_private.h"

static void state_set(struct lh_unit *unit, enum lh_spill_state state)
{
    LH_ASSERT(lh_states_may(lh_states_spill, (int)unit->parts->spill.state, (int)state));
    unit->parts->spill.state = state;
}

/*
 * Whether the gradients have the parameters' dtype, as torch's always do. Only such gradients fit
 * the places of the unit's parameters.
 */
static bool is_like_params(const struct lh_engine *engine, const struct lh_unit *unit)
{
    for (uint32_t i = 0; i < unit->desc->param_count; i++) {
        const struct lh_gradient *gradient = &engine->gradients[unit->desc->param_first + i];

        if (gradient->pointer && gradient->dtype != unit->desc->dtype)
            return false;
    }
    return true;
}

/*
 * Whether all gradients that will arrive have arrived. Once the norm is requested, no more
 * gradients arrive; gradients on an accelerator then need a place in which to be summed, so
 * incomplete units are spilled, too.
 */
static bool is_whole(const struct lh_engine *engine, const struct lh_unit *unit)
{
    return unit->update.gradient_count == unit->desc->param_count ||
           (lh_engine_gradients_land(engine) && engine->norm->is_asked &&
            unit->update.gradient_count > 0);
}

static bool is_apart(const struct lh_engine *engine)
{
    LH_ASSERT(engine->spill);
    return engine->spill->apart.store != NULL;
}

/* Whether the unit's update does not begin before the close. */
static bool is_waiting(const struct lh_engine *engine, const struct lh_unit *unit)
{
    return !is_apart(engine) || lh_repeat_waits(engine) ||
           unit->update.gradient_count < unit->desc->param_count;
}

static void update_considered(struct lh_engine *engine, struct lh_unit *unit)
{
    if (!unit->parts->spill.is_chosen || unit->parts->spill.state != LH_SPILL_STATE_NONE ||
        engine->step_state != LH_STEP_STATE_OPEN || !is_whole(engine, unit) ||
        lh_unit_is_given(unit) || !is_like_params(engine, unit))
        return;
    state_set(unit, LH_SPILL_STATE_RUNNING);
    unit->parts->spill.next_chunk = 0;
    unit->parts->spill.written_count = 0;
    LH_ASSERT(engine->spill->queue && engine->spill->count < engine->opts.unit_count);
    engine->spill->queue[engine->spill->count++] = (uint32_t)(unit - engine->units);
    if (is_waiting(engine, unit)) /* otherwise its update holds them */
        lh_gradient_hold_unit(engine, unit);
}

void lh_spill_consider_all(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        update_considered(engine, &engine->units[i]);
}

/* Runs on a worker: gather a chunk's gradients, with zeros between them, and make checksums. */
static void gather_run(struct lh_exec_job *job)
{
    struct lh_slab *slab = job->context;
    struct lh_engine *engine = slab->engine;
    const struct lh_chunk *chunk = &engine->chunks[slab->chunk];
    const struct lh_unit *unit = &engine->units[chunk->unit];
    const uint64_t element_bytes = lh_dtype_bytes(unit->desc->dtype);
    const uint64_t bytes = chunk->count * element_bytes;

    memset(slab->memory, 0, bytes);
    for (uint32_t i = 0; i < unit->desc->param_count; i++) {
        const struct lh_engine_param *param = &engine->params[unit->desc->param_first + i];
        uint64_t first = lh_max_u64(param->first, chunk->first);
        uint64_t end = lh_min_u64(param->first + param->count, chunk->first + chunk->count);

        if (first < end && engine->gradients[unit->desc->param_first + i].pointer)
            memcpy(slab->memory + (first - chunk->first) * element_bytes,
                   lh_gradient_at(engine, unit->desc->param_first + i, first),
                   (end - first) * element_bytes);
    }
    for (uint64_t at = 0; at < bytes; at += LH_CHECKSUM_BYTES)
        slab->checksums[at / LH_CHECKSUM_BYTES] =
            lh_crc32c(0, slab->memory + at, lh_min_u64(LH_CHECKSUM_BYTES, bytes - at));
}

void lh_spill_release(struct lh_engine *engine, struct lh_unit *unit)
{
    struct lh_spill_unit *spill = &unit->parts->spill;
    bool is_computed = unit->update.chunks_computed == unit->chunk_count;
    if (spill->state != LH_SPILL_STATE_DONE || unit->parts->norm.state != LH_NORM_STATE_DONE ||
        spill->is_released)
        return;
    if (!is_computed && (spill->is_stopped || !is_waiting(engine, unit)))
        return;
    LH_ASSERT(spill->written_count == unit->chunk_count);
    spill->is_released = true;
    if (!unit->update.is_counted) /* the update that held them was undone */
        unit->update.gradient_bytes = 0;
    lh_gradient_release_unit(engine, unit);
    for (uint32_t i = 0; i < unit->chunk_count; i++)
        LH_FEATURE_CALL(engine, chunk_consumed, &engine->chunks[unit->chunk_first + i]);
}

/* A chunk's gradients are on SSD, or need not be. */
static void chunk_done(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(unit->parts->spill.written_count < unit->parts->spill.next_chunk);
    if (++unit->parts->spill.written_count < unit->chunk_count)
        return;
    state_set(unit, LH_SPILL_STATE_DONE);
    lh_spill_release(engine, unit);
}

static void chunk_written(struct lh_engine *engine, struct lh_transfer *transfer)
{
    struct lh_slab *slab = &engine->slabs[transfer->slab];
    uint32_t index = engine->chunks[slab->chunk].unit;
    struct lh_unit *unit = lh_engine_unit_at(engine, index);

    lh_slab_return(engine, slab);
    chunk_done(engine, unit);
}

/* The transfer of a chunk's gradients to or from the place where they wait on SSD. */
static struct lh_transfer transfer_of(struct lh_engine *engine, const struct lh_chunk *chunk)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    const uint64_t element_bytes = lh_dtype_bytes(unit->desc->dtype);
    struct lh_transfer transfer = {
        .source = &engine->transfers.store,
        .unit = chunk->unit,
        .step = lh_core_step(engine),
        .extent = unit->desc->param_extent,
        .slot = lh_store_write_slot(engine->store, unit->desc->store_group),
        .offset = chunk->first * element_bytes,
        .bytes = chunk->count * element_bytes,
    };
    LH_ASSERT(unit->parts->spill.is_chosen && chunk->count > 0);
    if (!is_apart(engine))
        return transfer;
    transfer.source = &engine->spill->apart;
    transfer.extent = 0;
    transfer.slot = lh_store_write_slot(engine->spill->apart.store, 0);
    transfer.offset += unit->parts->spill.first_byte;
    return transfer;
}

static void gather_done(struct lh_engine *engine, struct lh_job *job)
{
    struct lh_slab *slab = job->exec.context;
    const struct lh_chunk *chunk = &engine->chunks[slab->chunk];

    LH_ASSERT(slab->is_lent);
    LH_ASSERT(engine->units[chunk->unit].parts->spill.state == LH_SPILL_STATE_RUNNING);
    lh_slab_job_account(engine, job, LH_ENGINE_TRACE_GATHER);
    slab->transfers[0] = transfer_of(engine, chunk);
    slab->transfers[0].done = chunk_written;
    slab->transfers[0].kind = LH_IO_KIND_WRITE;
    slab->transfers[0].priority = LH_PRIORITY_WRITE;
    slab->transfers[0].link = LH_ENGINE_LINK_GRADIENT_WRITE;
    slab->transfers[0].slab = (uint32_t)(slab - engine->slabs);
    slab->transfers[0].buffer = slab->memory;
    lh_transfer_submit(engine, &slab->transfers[0]);
}

static void gather_start(struct lh_engine *engine, struct lh_unit *unit, uint32_t slab_index)
{
    LH_ASSERT(slab_index < engine->budget.slab_count);
    LH_ASSERT(unit->parts->spill.next_chunk < unit->chunk_count);
    LH_ASSERT(unit->parts->spill.state == LH_SPILL_STATE_RUNNING);
    struct lh_slab *slab = &engine->slabs[slab_index];
    struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + unit->parts->spill.next_chunk++];
    const struct lh_transfer transfer = transfer_of(engine, chunk);
    uint32_t count = 0;
    uint32_t *checksums =
        lh_store_checksums(transfer.source->store, transfer.extent, transfer.slot, &count);

    LH_ASSERT(is_apart(engine) ||
              transfer.slot != lh_store_read_slot(engine->store, unit->desc->store_group));
    LH_ASSERT(lh_div_ceil(transfer.offset + transfer.bytes, LH_CHECKSUM_BYTES) <= count);
    lh_slab_lend(engine, slab, chunk);
    slab->checksums = checksums + transfer.offset / LH_CHECKSUM_BYTES;
    unit->parts->spill.moved_bytes += transfer.bytes;
    slab->job = (struct lh_job){
        .exec = {.run = gather_run, .context = slab, .work_bytes = 2 * transfer.bytes},
        .done = gather_done,
    };
    lh_job_submit(engine, &slab->job);
}

static bool pump_gradients(struct lh_engine *engine)
{
    bool moved = false;

    LH_ASSERT(engine->spill->first <= engine->spill->count);
    for (uint32_t i = engine->spill->first; i < engine->spill->count; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, engine->spill->queue[i]);

        while (unit->parts->spill.next_chunk < unit->chunk_count &&
               unit->parts->landing.count == 0) {
            uint32_t slab = lh_slab_find(engine, NULL);

            if (slab == LH_CHUNK_NONE)
                return moved;
            gather_start(engine, unit, slab);
            moved = true;
        }
        if (i == engine->spill->first && unit->parts->spill.next_chunk == unit->chunk_count)
            engine->spill->first++;
    }
    return moved;
}

/* Read a chunk's gradients into its slab, after R, M and V. */
static void gradients_read(struct lh_engine *engine, struct lh_chunk *chunk)
{
    struct lh_slab *slab = &engine->slabs[chunk->slab];
    const struct lh_unit *unit = &engine->units[chunk->unit];
    struct lh_transfer transfer = transfer_of(engine, chunk);

    LH_ASSERT(!slab->is_lent && !slab->gradients);
    slab->gradients = lh_slab_array(slab, unit, LH_STATE_ARRAY_COUNT, chunk->count);
    /* the slab with the first read was taken, or no read was planned */
    if (chunk->spill.gradient_step == lh_core_step(engine) || is_apart(engine))
        lh_core_stats(engine, lh_core_step(engine))->planned_bytes[LH_ENGINE_LINK_GRADIENT_READ] +=
            transfer.bytes;
    chunk->spill.gradient_step = lh_core_step(engine);
    transfer.kind = LH_IO_KIND_READ;
    transfer.priority = LH_PRIORITY_STATE;
    transfer.link = LH_ENGINE_LINK_GRADIENT_READ;
    transfer.buffer = lh_slab_array(slab, unit, LH_STATE_ARRAY_COUNT, chunk->count);
    lh_chunk_reads_more(engine, chunk, &transfer);
}

/* Whether the update reads the unit's gradients from SSD. */
static bool is_read(const struct lh_engine *engine, const struct lh_unit *unit)
{
    return is_apart(engine) ? unit->parts->spill.is_released
                            : unit->parts->spill.state == LH_SPILL_STATE_DONE;
}

static void chunk_read(struct lh_engine *engine, struct lh_chunk *chunk)
{
    if (is_read(engine, &engine->units[chunk->unit]))
        gradients_read(engine, chunk);
}

/* A chunk that was read ahead lacks its gradients, which were not on SSD yet: read them. */
static bool chunk_is_whole(struct lh_engine *engine, struct lh_chunk *chunk)
{
    if (!is_read(engine, &engine->units[chunk->unit]) || engine->slabs[chunk->slab].gradients)
        return true;
    gradients_read(engine, chunk);
    return false;
}

static bool gradient_accepts(struct lh_engine *engine, struct lh_unit *unit)
{
    struct lh_error err = {0};
    if (unit->parts->spill.state == LH_SPILL_STATE_NONE)
        return true;
    lh_error_set(&err, -EINVAL,
                 "a gradient of unit %u arrived after the norm of all gradients was requested",
                 (unsigned)(unit - engine->units));
    lh_core_fail(engine, &err);
    return false;
}

/* After the close, gradients are released with the last chunk's update: nothing else reads them. */
static bool update_may_start(const struct lh_engine *engine, const struct lh_unit *unit)
{
    bool is_beside = is_apart(engine) && engine->step_state == LH_STEP_STATE_OPEN;
    return is_beside || unit->parts->spill.state != LH_SPILL_STATE_RUNNING;
}

static bool gradients_stay(const struct lh_engine *engine, const struct lh_unit *unit)
{
    (void)engine;
    return unit->parts->spill.state == LH_SPILL_STATE_RUNNING;
}

static void unit_computed(struct lh_engine *engine, struct lh_unit *unit)
{
    lh_spill_release(engine, unit);
}

/* Write no more of a unit's gradients: the step is closed, and they are in memory. */
static void stop(struct lh_engine *engine, struct lh_unit *unit)
{
    struct lh_spill_unit *spill = &unit->parts->spill;
    LH_ASSERT(is_apart(engine) && engine->step_state == LH_STEP_STATE_CLOSED);
    if (spill->state != LH_SPILL_STATE_RUNNING)
        return;
    spill->is_stopped = true;
    while (spill->next_chunk < unit->chunk_count) {
        spill->next_chunk++;
        chunk_done(engine, unit);
    }
}

static bool step_may_end(const struct lh_engine *engine)
{
    bool is_running = false;
    for (uint32_t i = 0; i < engine->spill->count; i++)
        is_running |=
            engine->units[engine->spill->queue[i]].parts->spill.state == LH_SPILL_STATE_RUNNING;
    return !is_running;
}

static void planned(struct lh_engine *engine, struct lh_unit *unit, uint64_t step)
{
    struct lh_engine_step_stats *stats = lh_core_stats(engine, step);
    unit->parts->spill.planned_step = unit->parts->spill.is_chosen ? step : 0;
    if (!unit->parts->spill.is_chosen)
        return;
    stats->planned_bytes[LH_ENGINE_LINK_GRADIENT_WRITE] += unit->desc->bytes;
    if (!is_apart(engine))
        stats->planned_bytes[LH_ENGINE_LINK_GRADIENT_READ] += unit->desc->bytes;
}

/*
 * Correct the plan for a unit with only some of its gradients, which wait in memory; or, apart, for
 * a unit whose gradients need not all be written.
 */
static void plan_corrected(struct lh_engine *engine, struct lh_unit *unit)
{
    struct lh_engine_step_stats *stats = lh_core_stats(engine, engine->step);
    /* An abort resets the plan, and with it the unit's planned_step, but not the one of spill. */
    bool is_planned = unit->update.planned_step == engine->step &&
                      unit->parts->spill.planned_step == engine->step;
    if (is_apart(engine)) {
        stop(engine, unit);
        stats->planned_bytes[LH_ENGINE_LINK_GRADIENT_WRITE] +=
            unit->parts->spill.moved_bytes - (is_planned ? unit->desc->bytes : 0);
        return;
    }
    if (!is_planned || unit->parts->spill.state != LH_SPILL_STATE_NONE)
        return;
    stats->planned_bytes[LH_ENGINE_LINK_GRADIENT_WRITE] -= unit->desc->bytes;
    stats->planned_bytes[LH_ENGINE_LINK_GRADIENT_READ] -= unit->desc->bytes;
    unit->parts->spill.planned_step = 0;
}

static void step_forgotten(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_spill_unit *spill = &engine->units[i].parts->spill;
        if (spill->state != LH_SPILL_STATE_NONE)
            state_set(&engine->units[i], LH_SPILL_STATE_NONE);
        spill->is_released = false;
        spill->is_stopped = false;
        spill->moved_bytes = 0;
    }
    for (uint32_t i = 0; i < engine->chunk_count; i++)
        engine->chunks[i].spill.gradient_step = 0;
    for (uint32_t i = 0; i < engine->budget.slab_count; i++) {
        engine->slabs[i].gradients = NULL;
        if (engine->slabs[i].is_lent) /* lent for a step that was aborted */
            lh_slab_return(engine, &engine->slabs[i]);
    }
    engine->spill->first = 0;
    engine->spill->count = 0;
}

/* The uncommitted slot holds gradients, not the newest parameters: every due commit must happen. */
static bool step_may_skip_commit(const struct lh_engine *engine)
{
    (void)engine;
    return false;
}

/* Before the close, slabs are used to spill gradients, not to read chunks of waiting updates. */
static bool ahead_may_read(const struct lh_engine *engine)
{
    return is_apart(engine) && !lh_repeat_waits(engine);
}

/* Whether gradients may be spilled: every step commits, and a slab has room for them. */
static bool may_spill(const struct lh_engine *engine, const struct lh_unit *unit)
{
    uint64_t elements = engine->budget.chunk_elements;
    uint64_t bytes = elements * lh_dtype_bytes(unit->desc->dtype);

    for (uint32_t i = 0; i < LH_STATE_ARRAY_COUNT; i++)
        bytes += lh_unit_state_bytes(&unit->states[i], elements);
    return engine->opts.commit_every == 1 && bytes <= engine->budget.slab_bytes;
}

/*
 * Choose units to spill: all after the first ones whose waiting gradients fit in memory. Returns
 * whether there are any.
 */
static bool choose(struct lh_engine *engine)
{
    bool is_any = false;
    uint64_t room = engine->budget.gradient_waiting_bytes;

    if (lh_engine_gradients_land(engine))
        room = room / lh_max_u64(engine->landing->block_bytes, 1) * engine->landing->block_bytes;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];

        unit->parts->spill.is_chosen = false;
        bool waits = unit->parts->defer.is_deferred || engine->opts.repeats;
        if (!waits || unit->desc->elements == 0 || !may_spill(engine, unit))
            continue;
        unit->parts->spill.is_chosen = lh_landing_waiting_bytes(engine, unit) > room;
        is_any |= unit->parts->spill.is_chosen;
        room = unit->parts->spill.is_chosen ? 0 : room - lh_landing_waiting_bytes(engine, unit);
    }
    return is_any;
}

/* Give each unit's gradients a place in the store for gradients apart. */
static int apart_create(struct lh_engine *engine, struct lh_error *err)
{
    struct lh_store *store = engine->opts.apart.store;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        unit->parts->spill.first_byte = bytes;
        if (unit->parts->spill.is_chosen)
            bytes += lh_align_up(unit->desc->bytes, LH_CHECKSUM_BYTES);
    }
    LH_ASSERT(lh_is_aligned(bytes, LH_CHECKSUM_BYTES));
    uint64_t most = store ? lh_store_extent(store, 0).bytes : 0;
    if (bytes > most)
        return lh_error_set(err, -ENOSPC,
                            "gradients that a repetition may need take %" PRIu64
                            " bytes on SSD, and there is room for %" PRIu64,
                            bytes, most);
    engine->spill->apart = (struct lh_source){.ops = &lh_transfer_store_ops,
                                              .store = store,
                                              .is_of_units = true,
                                              .file_first = engine->opts.apart.file_first};
    return 0;
}

int lh_spill_create(struct lh_engine *engine, struct lh_error *err)
{
    uint32_t count = engine->opts.unit_count;
    if (!choose(engine))
        return 0;
    LH_TRY(LH_ENGINE_PART_CREATE(engine, spill, err));
    engine->spill->queue = lh_alloc_zeroed(engine->alloc, count, sizeof(uint32_t));
    if (!engine->spill->queue)
        return lh_error_set(err, -ENOMEM, "no memory for gradients of %u units on SSD", count);
    return engine->opts.repeats ? apart_create(engine, err) : 0;
}

void lh_spill_destroy(struct lh_engine *engine)
{
    if (engine->spill)
        lh_free(engine->alloc, engine->spill->queue);
}

const struct lh_feature lh_spill_feature = {
    .name = "spill",
    .gradient_accepts = gradient_accepts,
    .update_considered = update_considered,
    .update_may_start = update_may_start,
    .gradients_stay = gradients_stay,
    .unit_computed = unit_computed,
    .chunk_read = chunk_read,
    .chunk_is_whole = chunk_is_whole,
    .planned = planned,
    .plan_corrected = plan_corrected,
    .step_may_end = step_may_end,
    .step_may_skip_commit = step_may_skip_commit,
    .step_forgotten = step_forgotten,
    .ahead_may_read = ahead_may_read,
    .pump_gradients = pump_gradients,
};
