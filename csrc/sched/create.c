/* Making and unmaking an engine: every byte that it will ever need is allocated here. */
#define _GNU_SOURCE /* pthread_setname_np */
#include <inttypes.h>
#include <string.h>

#include "base/thread.h"
#include "sched/engine_private.h"

/* Of a model's chunks, what its first units have: an embedding and a block or two. */
#define FIRST_DIVISOR 16

static int opts_validate(const struct lh_engine_opts *opts, struct lh_error *err)
{
    const struct lh_budget *budget = opts->budget;
    uint64_t needed = budget->region_bytes + budget->slab_count * budget->slab_bytes +
                      (opts->dev && !opts->gradients_in_memory ? budget->gradient_bytes : 0);
    if (opts->unit_count == 0 || opts->group_count == 0)
        return lh_error_set(err, -EINVAL, "an engine needs units and a group");
    if ((uint32_t)opts->schedule >= LH_ENGINE_SCHEDULE_COUNT)
        return lh_error_set(err, -EINVAL, "schedule %d is none", (int)opts->schedule);
    bool is_all_deferred = opts->schedule == LH_ENGINE_SCHEDULE_SERIAL ||
                           opts->schedule == LH_ENGINE_SCHEDULE_DEFERRED;
    if (opts->norms && !is_all_deferred)
        return lh_error_set(err, -EINVAL, "norms need every update to be deferred");
    if (opts->memory_bytes < needed)
        return lh_error_set(err, -EINVAL,
                            "memory_bytes %" PRIu64 " is below the %" PRIu64 " of the budget",
                            opts->memory_bytes, needed);
    if (opts->dev && (!opts->device_memory || opts->copy_count == 0))
        return lh_error_set(err, -EINVAL, "a device needs memory and copies");
    if (opts->io_depth == 0 || opts->transfer_bytes == 0 ||
        !lh_is_aligned(opts->transfer_bytes, LH_CHECKSUM_BYTES))
        return lh_error_set(err, -EINVAL,
                            "io_depth %u or transfer_bytes %" PRIu64 " is out of range",
                            opts->io_depth, opts->transfer_bytes);
    for (uint32_t i = 0; i < opts->unit_count; i++) {
        const struct lh_engine_unit *unit = &opts->units[i];
        bool is_whole =
            unit->elements == 0 || (lh_is_aligned(unit->elements, LH_ENGINE_ELEMENT_ALIGN) &&
                                    unit->bytes == unit->elements * lh_dtype_bytes(unit->dtype));
        if (unit->bytes == 0 || !lh_is_aligned(unit->bytes, LH_BLOCK_BYTES) || !is_whole)
            return lh_error_set(err, -EINVAL, "unit %u: %" PRIu64 " bytes, %" PRIu64 " elements", i,
                                unit->bytes, unit->elements);
    }
    return 0;
}

static int tables_create(struct lh_engine *engine, const struct lh_engine_opts *opts,
                         struct lh_error *err)
{
    struct lh_alloc *alloc = engine->alloc;
    uint32_t units = opts->unit_count;
    engine->units = lh_alloc_zeroed(alloc, units, sizeof(*engine->units));
    engine->params =
        lh_alloc_zeroed(alloc, lh_max_u64(opts->param_count, 1), sizeof(*engine->params));
    engine->param_steps =
        lh_alloc_zeroed(alloc, lh_max_u64(opts->param_count, 1), sizeof(uint64_t));
    engine->gradient_steps =
        lh_alloc_zeroed(alloc, lh_max_u64(opts->param_count, 1), sizeof(uint64_t));
    engine->gradients =
        lh_alloc_zeroed(alloc, lh_max_u64(opts->param_count, 1), sizeof(*engine->gradients));
    engine->square_sums =
        lh_alloc_zeroed(alloc, lh_max_u64(opts->param_count, 1), 2 * sizeof(double));
    engine->update_queue = lh_alloc_zeroed(alloc, units, sizeof(uint32_t));
    engine->spill_queue = lh_alloc_zeroed(alloc, units, sizeof(uint32_t));
    engine->deferred = lh_alloc_zeroed(alloc, units, sizeof(uint32_t));
    engine->predicted_updates = lh_alloc_zeroed(alloc, units, sizeof(uint32_t));
    engine->hypers[0] = lh_alloc_zeroed(alloc, opts->group_count, sizeof(struct lh_adam_hyper));
    engine->hypers[1] = lh_alloc_zeroed(alloc, opts->group_count, sizeof(struct lh_adam_hyper));
    engine->requests =
        lh_alloc_zeroed(alloc, 4 * (uint64_t)opts->io_depth, sizeof(*engine->requests));
    engine->commit_requests =
        lh_alloc_zeroed(alloc, LH_IO_FILE_COUNT_MAX, sizeof(*engine->commit_requests));
    if (opts->trace_count > 0) {
        engine->trace = lh_alloc_zeroed(alloc, opts->trace_count, sizeof(*engine->trace));
        if (!engine->trace)
            return lh_error_set(err, -ENOMEM, "no memory for %u trace events", opts->trace_count);
    }
    if (!engine->units || !engine->params || !engine->param_steps || !engine->gradient_steps ||
        !engine->gradients || !engine->square_sums || !engine->update_queue ||
        !engine->predicted_updates || !engine->spill_queue || !engine->deferred ||
        !engine->hypers[0] || !engine->hypers[1] || !engine->requests || !engine->commit_requests)
        return lh_error_set(err, -ENOMEM, "no memory for the tables of %u units", units);
    memcpy(engine->params, opts->params, opts->param_count * sizeof(*engine->params));
    for (uint32_t i = 0; i < units; i++) {
        engine->units[i].desc = opts->units[i];
        engine->units[i].desc.place_bytes =
            lh_max_u64(opts->units[i].place_bytes, opts->units[i].bytes);
        engine->units[i].engine = engine;
        engine->units[i].is_predicted = opts->units[i].elements > 0;
        engine->units[i].is_deferred = engine->opts.schedule == LH_ENGINE_SCHEDULE_SERIAL ||
                                       engine->opts.schedule == LH_ENGINE_SCHEDULE_DEFERRED;
    }
    for (uint32_t i = 0; i < 4 * opts->io_depth; i++) {
        engine->requests[i].engine = engine;
        engine->requests[i].next_free = engine->free_requests;
        engine->free_requests = &engine->requests[i];
    }
    return 0;
}

/*
 * Of the chunks in front of index, how many keep their slabs: those of the first units, which are
 * updated last while the next forward waits for them, and the others evenly over the model, so that
 * the traffic of those that do not is spread over backward.
 */
static uint32_t kept_before(const struct lh_engine *engine, uint32_t index)
{
    uint64_t count = engine->budget.chunk_count;
    uint64_t kept_count = engine->budget.kept_chunk_count;
    uint64_t first_count = lh_min_u64(count / FIRST_DIVISOR, kept_count);
    if (index <= first_count)
        return index;
    return (uint32_t)(first_count +
                      (index - first_count) * (kept_count - first_count) / (count - first_count));
}

static int chunks_create(struct lh_engine *engine, struct lh_error *err)
{
    uint64_t elements_max = engine->budget.chunk_elements;
    uint64_t count = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        count += lh_div_ceil(engine->units[i].desc.elements, elements_max);
    LH_ASSERT(count == engine->budget.chunk_count);
    engine->chunks = lh_alloc_zeroed(engine->alloc, lh_max_u64(count, 1), sizeof(*engine->chunks));
    if (!engine->chunks)
        return lh_error_set(err, -ENOMEM, "no memory for %" PRIu64 " chunks", count);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        unit->chunk_first = engine->chunk_count;
        for (uint64_t first = 0; first < unit->desc.elements; first += elements_max) {
            uint32_t index = engine->chunk_count++;
            engine->chunks[index] = (struct lh_chunk){
                .unit = i,
                .slab = LH_CHUNK_NONE,
                .block = LH_BLOCK_NONE,
                .first = first,
                .count = lh_min_u64(elements_max, unit->desc.elements - first),
                .is_kept = kept_before(engine, index + 1) > kept_before(engine, index),
                .kept_slab = kept_before(engine, index),
            };
            unit->chunk_count++;
        }
    }
    return 0;
}

/* The most parameters that have elements in one chunk. */
static uint64_t segments_max(const struct lh_engine *engine)
{
    uint64_t most = 1;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        most = lh_max_u64(most, engine->units[i].desc.param_count);
    return lh_min_u64(most, engine->budget.chunk_elements / LH_ENGINE_PARAM_ALIGN + 2);
}

static int slabs_create(struct lh_engine *engine, struct lh_error *err)
{
    struct lh_alloc *alloc = engine->alloc;
    uint64_t segment_max = segments_max(engine);
    uint64_t checksum_max = lh_div_ceil(engine->budget.chunk_elements * 4, LH_CHECKSUM_BYTES);
    uint32_t count = engine->budget.slab_count;
    engine->slabs = lh_alloc_zeroed(alloc, lh_max_u64(count, 1), sizeof(*engine->slabs));
    if (!engine->slabs)
        return lh_error_set(err, -ENOMEM, "no memory for %u slabs", count);
    for (uint32_t i = 0; i < count; i++) {
        struct lh_slab *slab = &engine->slabs[i];
        slab->engine = engine;
        slab->chunk = LH_CHUNK_NONE;
        slab->memory = engine->region + engine->budget.region_bytes + i * engine->budget.slab_bytes;
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

/* Step and step counts as the last commit left them. */
static int resume(struct lh_engine *engine, struct lh_error *err)
{
    uint64_t overhead = lh_engine_scalar_overhead_bytes(engine->param_count);
    engine->scalar_bytes_max = lh_store_scalar_bytes_max(engine->store);
    if (engine->scalar_bytes_max < overhead)
        return lh_error_set(err, -EBADMSG,
                            "the store keeps %" PRIu64
                            " bytes of scalars; %u parameters need %" PRIu64,
                            engine->scalar_bytes_max, engine->param_count, overhead);
    engine->scalars = lh_alloc_zeroed(engine->alloc, 1, engine->scalar_bytes_max);
    if (!engine->scalars)
        return lh_error_set(err, -ENOMEM, "no memory for %" PRIu64 " bytes of scalars",
                            engine->scalar_bytes_max);
    engine->scalar_bytes = overhead;
    engine->step = lh_store_step(engine->store);
    engine->committed_step = engine->step;
    engine->first_step = engine->step;
    engine->open_step = 1;
    uint64_t bytes = 0;
    const uint8_t *scalars = lh_store_scalars(engine->store, &bytes);
    if (bytes == 0)
        return 0;
    uint64_t caller_bytes = 0;
    const void *caller = lh_engine_scalars_find(scalars, bytes, &caller_bytes);
    if (!caller || bytes - caller_bytes != overhead)
        return lh_error_set(err, -EBADMSG,
                            "the store's last commit is not of a model with %u parameters",
                            engine->param_count);
    memcpy(engine->scalars, scalars, bytes);
    engine->scalar_bytes = bytes;
    memcpy(engine->param_steps,
           scalars + overhead - (uint64_t)engine->param_count * sizeof(uint64_t),
           engine->param_count * sizeof(uint64_t));
    return 0;
}

static int thread_start(struct lh_engine *engine, struct lh_error *err)
{
    int rc = lh_thread_start(&engine->thread, NULL, lh_engine_thread_run, engine);
    if (rc < 0)
        return lh_error_set(err, rc, "the system refuses the engine's thread");
    pthread_setname_np(engine->thread, "lohan-engine");
    engine->has_thread = true;
    return 0;
}

static void shared_init(struct lh_engine *engine)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&engine->shared.mutex, NULL);
    pthread_cond_init(&engine->shared.changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

int lh_engine_create(const struct lh_engine_opts *opts, struct lh_alloc *alloc,
                     struct lh_engine **engine_out, struct lh_error *err)
{
    *engine_out = NULL;
    LH_TRY(opts_validate(opts, err));
    struct lh_engine *engine = lh_alloc_zeroed(alloc, 1, sizeof(*engine));
    if (!engine)
        return lh_error_set(err, -ENOMEM, "no memory for the engine");
    engine->alloc = alloc;
    engine->opts = *opts;
    engine->opts.units = NULL;
    engine->opts.params = NULL;
    engine->opts.budget = NULL;
    engine->budget = *opts->budget;
    engine->store = opts->store;
    engine->io = opts->io;
    engine->exec = opts->exec;
    engine->dev = opts->dev;
    engine->waker = opts->waker;
    engine->clock = opts->clock;
    engine->region = opts->memory;
    engine->param_count = opts->param_count;
    engine->takes_norms = opts->norms;
    engine->gradient_scales[0] = 1.0;
    engine->gradient_scales[1] = 1.0;
    shared_init(engine);
    int rc = lh_ring_init(&engine->inbox, alloc, LH_INBOX_CELL_COUNT, err);
    if (rc == 0)
        rc = tables_create(engine, opts, err);
    if (rc == 0)
        rc = lh_in_place_create(engine, err);
    if (rc == 0)
        rc = lh_region_create_all(engine, err);
    if (rc == 0)
        rc = chunks_create(engine, err);
    if (rc == 0)
        rc = slabs_create(engine, err);
    if (rc == 0)
        rc = lh_device_create(engine, err);
    if (rc == 0)
        rc = lh_saved_create(engine, err);
    if (rc == 0)
        rc = resume(engine, err);
    if (rc == 0) {
        lh_spill_choose(engine);
        lh_split_begin(engine);
    }
    if (rc == 0 && !opts->manual)
        rc = thread_start(engine, err);
    if (rc < 0) {
        lh_engine_destroy(engine);
        return rc;
    }
    *engine_out = engine;
    return 0;
}

void lh_engine_stop(struct lh_engine *engine)
{
    if (!engine->has_thread)
        return;
    pthread_mutex_lock(&engine->shared.mutex);
    atomic_store(&engine->stopping, true);
    pthread_cond_broadcast(&engine->shared.changed);
    pthread_mutex_unlock(&engine->shared.mutex);
    lh_waker_wake(engine->waker);
    pthread_join(engine->thread, NULL);
    engine->has_thread = false;
}

static void tables_destroy(struct lh_engine *engine)
{
    struct lh_alloc *alloc = engine->alloc;
    for (uint32_t i = 0; engine->slabs && i < engine->budget.slab_count; i++) {
        lh_free(alloc, engine->slabs[i].segments);
        for (uint32_t j = 0; j < LH_STATE_ARRAY_COUNT; j++)
            lh_free(alloc, engine->slabs[i].expected[j]);
    }
    void *const tables[] = {
        engine->units,        engine->params,
        engine->param_steps,  engine->gradient_steps,
        engine->gradients,    engine->square_sums,
        engine->update_queue, engine->deferred,
        engine->spill_queue,  engine->predicted_updates,
        engine->hypers[0],    engine->hypers[1],
        engine->requests,     engine->commit_requests,
        engine->trace,        engine->chunks,
        engine->slabs,        engine->scalars,
        engine->seams,
    };
    for (size_t i = 0; i < LH_COUNT_OF(tables); i++)
        lh_free(alloc, tables[i]);
}

void lh_engine_destroy(struct lh_engine *engine)
{
    if (!engine)
        return;
    lh_engine_stop(engine);
    struct lh_alloc *alloc = engine->alloc;
    lh_saved_destroy(engine);
    lh_device_destroy(engine);
    tables_destroy(engine);
    lh_region_destroy_all(engine);
    if (engine->inbox.cells)
        lh_ring_deinit(&engine->inbox, alloc);
    pthread_cond_destroy(&engine->shared.changed);
    pthread_mutex_destroy(&engine->shared.mutex);
    lh_free(alloc, engine);
}
