/* Creation and destruction of an engine. All memory it needs is allocated at creation. */
#define _GNU_SOURCE /* pthread_setname_np */
#include <inttypes.h>
#include <string.h>

#include "base/thread.h"
#include "sched/engine_private.h"

/* A repetition needs the previous commit's values, and gradients that stay where they are. */
static int repeats_validate(const struct lh_engine_opts *opts, struct lh_error *err)
{
    if (!opts->repeats)
        return 0;
    if (!opts->norms || opts->schedule != LH_ENGINE_SCHEDULE_OPTIMIZED || opts->commit_every != 1 ||
        opts->team || opts->sum_bytes > 0)
        return lh_error_set(err, -EINVAL,
                            "steps can be repeated with norms, schedule OPTIMIZED, a commit in each"
                            " step, and without a team or sums");
    for (uint32_t i = 0; i < opts->unit_count; i++) {
        const struct lh_engine_unit *unit = &opts->units[i];
        const struct lh_rule_row *rule = &lh_rules[unit->rule];
        if (unit->elements == 0)
            continue;
        if (unit->family > 0 || unit->is_given || rule->has_rows || rule->has_factors ||
            rule->has_matrices)
            return lh_error_set(err, -EINVAL,
                                "unit %u: steps cannot be repeated with its rule or its idle steps",
                                i);
    }
    return 0;
}

static int opts_validate(const struct lh_engine_opts *opts, struct lh_error *err)
{
    const struct lh_budget *budget = opts->budget;
    uint64_t needed = (opts->team ? 0 : budget->region_bytes) +
                      budget->slab_count * budget->slab_bytes +
                      (opts->dev && !opts->gradients_in_memory ? budget->gradient_bytes : 0);
    if (opts->unit_count == 0 || opts->group_count == 0)
        return lh_error_set(err, -EINVAL, "an engine needs at least one unit and one group");
    if ((uint32_t)opts->schedule >= LH_ENGINE_SCHEDULE_COUNT)
        return lh_error_set(err, -EINVAL, "unknown schedule %d", (int)opts->schedule);
    bool is_all_deferred = opts->schedule == LH_ENGINE_SCHEDULE_SERIAL ||
                           opts->schedule == LH_ENGINE_SCHEDULE_DEFERRED;
    if (opts->norms && !is_all_deferred && !opts->repeats)
        return lh_error_set(err, -EINVAL, "gradient norms require every update to be deferred");
    LH_TRY(repeats_validate(opts, err));
    if (opts->team && opts->team->mate == 0 && !is_all_deferred)
        return lh_error_set(err, -EINVAL, "a team requires every update to be deferred");
    if (opts->gather_wait_ns > 0 && (!opts->team || !opts->dev))
        return lh_error_set(err, -EINVAL, "gathers need a team and an accelerator");
    if (opts->memory_bytes < needed)
        return lh_error_set(err, -EINVAL,
                            "memory_bytes %" PRIu64 " is less than the budget's %" PRIu64,
                            opts->memory_bytes, needed);
    if (opts->dev && (!opts->device_memory || opts->copy_count == 0))
        return lh_error_set(err, -EINVAL, "a device needs memory and a copy_count above 0");
    if (opts->units_in_memory && (!opts->dev || opts->team || !opts->dev->ops->is_ordered ||
                                  !opts->dev->ops->has_passed || !opts->dev->ops->synchronize))
        return lh_error_set(err, -EINVAL, "this device cannot read units in main memory");
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
            return lh_error_set(err, -EINVAL,
                                "unit %u: invalid size: %" PRIu64 " bytes, %" PRIu64 " elements", i,
                                unit->bytes, unit->elements);
        if (lh_adam_block_bytes(unit->rule, unit->states) > 0 && unit->elements > 0 &&
            (!lh_is_aligned(unit->elements, LH_ENGINE_SCALED_ALIGN) ||
             opts->budget->chunk_elements % LH_ENGINE_SCALED_ALIGN != 0))
            return lh_error_set(
                err, -EINVAL,
                "unit %u: %" PRIu64 " elements with states of blocks, chunks of %" PRIu64
                ": not multiples of %" PRIu64,
                i, unit->elements, opts->budget->chunk_elements, (uint64_t)LH_ENGINE_SCALED_ALIGN);
        bool is_mate = opts->team && opts->team->mate > 0;
        if (unit->is_given && !is_mate &&
            (opts->schedule != LH_ENGINE_SCHEDULE_SERIAL || !opts->gradients_in_memory))
            return lh_error_set(err, -EINVAL,
                                "unit %u: states in another process require schedule serial and"
                                " gradients in main memory",
                                i);
    }
    return 0;
}

static int tables_create(struct lh_engine *engine, const struct lh_engine_opts *opts,
                         struct lh_error *err)
{
    struct lh_alloc *alloc = engine->alloc;
    uint32_t units = opts->unit_count;
    engine->units = lh_alloc_zeroed(alloc, units, sizeof(*engine->units));
    engine->descs = lh_alloc_zeroed(alloc, units, sizeof(*engine->descs));
    engine->parts = lh_alloc_zeroed(alloc, units, sizeof(*engine->parts));
    engine->params =
        lh_alloc_zeroed(alloc, lh_max_u64(opts->param_count, 1), sizeof(*engine->params));
    engine->gradient_steps =
        lh_alloc_zeroed(alloc, lh_max_u64(opts->param_count, 1), sizeof(uint64_t));
    engine->gradients =
        lh_alloc_zeroed(alloc, lh_max_u64(opts->param_count, 1), sizeof(*engine->gradients));
    engine->hypers[0] = lh_alloc_zeroed(alloc, opts->group_count, sizeof(struct lh_adam_hyper));
    engine->hypers[1] = lh_alloc_zeroed(alloc, opts->group_count, sizeof(struct lh_adam_hyper));
    engine->commit_requests =
        lh_alloc_zeroed(alloc, LH_STORE_COMMIT_REQUEST_COUNT_MAX, sizeof(*engine->commit_requests));
    if (opts->trace_count > 0) {
        engine->trace = lh_alloc_zeroed(alloc, opts->trace_count, sizeof(*engine->trace));
        if (!engine->trace)
            return lh_error_set(err, -ENOMEM, "no memory for %u trace events", opts->trace_count);
    }
    if (!engine->units || !engine->descs || !engine->parts || !engine->params ||
        !engine->gradient_steps || !engine->gradients || !engine->hypers[0] || !engine->hypers[1] ||
        !engine->commit_requests)
        return lh_error_set(err, -ENOMEM, "no memory for the tables of %u units", units);
    memcpy(engine->params, opts->params, opts->param_count * sizeof(*engine->params));
    for (uint32_t i = 0; i < units; i++) {
        engine->descs[i] = opts->units[i];
        engine->descs[i].place_bytes = lh_max_u64(opts->units[i].place_bytes, opts->units[i].bytes);
        engine->units[i].desc = &engine->descs[i];
        engine->units[i].parts = &engine->parts[i];
        engine->units[i].engine = engine;
        engine->units[i].source = &engine->transfers.store;
    }
    return 0;
}

/* Restore the step and the parameters' step counts from the last commit. */
static int resume(struct lh_engine *engine, struct lh_error *err)
{
    uint64_t overhead = lh_scalars_overhead_bytes(engine->param_count);
    engine->scalar_bytes_max = lh_store_scalar_bytes_max(engine->store);
    if (engine->scalar_bytes_max < overhead)
        return lh_error_set(err, -EBADMSG,
                            "the store has room for %" PRIu64
                            " bytes of scalars; %u parameters need %" PRIu64,
                            engine->scalar_bytes_max, engine->param_count, overhead);
    engine->scalars = lh_alloc_zeroed(engine->alloc, 1, engine->scalar_bytes_max);
    if (!engine->scalars)
        return lh_error_set(err, -ENOMEM, "no memory for %" PRIu64 " bytes of scalars",
                            engine->scalar_bytes_max);
    engine->param_steps = lh_scalars_begin(engine->scalars, engine->param_count, 0);
    LH_ASSERT(lh_is_aligned((uintptr_t)engine->param_steps, sizeof(uint64_t)));
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
    const void *caller = lh_scalars_find(scalars, bytes, &caller_bytes);
    if (!caller || bytes - caller_bytes != overhead)
        return lh_error_set(err, -EBADMSG,
                            "the store's last commit does not belong to a model with %u parameters",
                            engine->param_count);
    memcpy(engine->scalars, scalars, bytes);
    engine->scalar_bytes = bytes;
    return 0;
}

static int thread_start(struct lh_engine *engine, struct lh_error *err)
{
    LH_ASSERT(!engine->has_thread && !engine->opts.manual);
    int rc = lh_thread_start(&engine->thread, NULL, lh_engine_thread_run, engine);
    if (rc < 0)
        return lh_error_set(err, rc, "cannot start the engine's thread");
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

static void feature_add(struct lh_engine *engine, const struct lh_feature *feature)
{
    LH_ASSERT(engine->features.count < LH_FEATURE_COUNT_MAX);
    engine->features.all[engine->features.count++] = feature;
}

/* Create deferred updates and, with schedule AUTO, the split between deferred and eager updates. */
static int deferring_create(struct lh_engine *engine, struct lh_error *err)
{
    LH_TRY(lh_defer_create(engine, err));
    if (engine->opts.schedule == LH_ENGINE_SCHEDULE_AUTO) {
        LH_TRY(lh_split_create(engine, err));
        feature_add(engine, &lh_split_feature);
    }
    feature_add(engine, &lh_defer_feature);
    return 0;
}

static int team_create(struct lh_engine *engine, struct lh_error *err)
{
    if (lh_engine_is_mate(engine))
        feature_add(engine, &lh_borrow_feature);
    if (!engine->opts.team || engine->opts.team->mate > 0)
        return 0;
    LH_TRY(lh_mates_create(engine, err));
    feature_add(engine, &lh_mates_feature);
    return 0;
}

/* Features are added in the order that feature.h documents. */
static int features_create(struct lh_engine *engine, struct lh_error *err)
{
    enum lh_engine_schedule schedule = engine->opts.schedule;
    bool is_all_deferred =
        schedule == LH_ENGINE_SCHEDULE_SERIAL || schedule == LH_ENGINE_SCHEDULE_DEFERRED;
    if (engine->dev)
        LH_TRY(lh_landing_create(engine, err));
    if (lh_idle_is_needed(engine)) {
        LH_TRY(lh_idle_create(engine, err));
        feature_add(engine, &lh_settle_feature);
    }
    if (is_all_deferred || schedule == LH_ENGINE_SCHEDULE_AUTO)
        LH_TRY(deferring_create(engine, err));
    if (is_all_deferred || engine->opts.repeats)
        LH_TRY(lh_spill_create(engine, err));
    bool has_sums = is_all_deferred || engine->opts.repeats || lh_norm_is_of_rule(engine);
    if (has_sums)
        LH_TRY(lh_norm_create(engine, err));
    if (engine->spill)
        feature_add(engine, &lh_spill_feature);
    if (engine->dev) {
        LH_TRY(lh_device_create(engine, err));
        if (!engine->copies_units)
            LH_TRY(LH_ENGINE_PART_CREATE(engine, unified, err));
        feature_add(engine, engine->copies_units ? &lh_device_feature : &lh_unified_feature);
    }
    if (lh_engine_gradients_land(engine))
        feature_add(engine, &lh_landing_feature);
    if (engine->opts.sum_bytes > 0) {
        LH_TRY(lh_sum_create(engine, err));
        feature_add(engine, &lh_sum_feature);
    }
    if (engine->dev && engine->opts.tail_bytes > 0) {
        LH_TRY(lh_tail_create(engine, err));
        feature_add(engine, &lh_tail_feature);
    }
    if (has_sums)
        feature_add(engine, &lh_norm_feature);
    if (engine->opts.repeats) {
        LH_TRY(lh_repeat_create(engine, err));
        feature_add(engine, &lh_repeat_feature);
    }
    if (lh_orthogonal_is_needed(engine)) {
        LH_TRY(lh_orthogonal_create(engine, err));
        feature_add(engine, &lh_orthogonal_feature);
    }
    if (engine->opts.saved.memory_bytes > 0) {
        LH_TRY(lh_saved_create(engine, err));
        feature_add(engine, &lh_saved_feature);
    }
    if (schedule == LH_ENGINE_SCHEDULE_NAIVE) {
        feature_add(engine, &lh_naive_feature);
        engine->pump_updates = lh_naive_pump_updates;
    }
    LH_TRY(team_create(engine, err));
    if (engine->copies_units) {
        LH_TRY(LH_ENGINE_PART_CREATE(engine, reading, err));
        feature_add(engine, &lh_reading_feature);
    }
    if (lh_given_is_any(engine))
        feature_add(engine, &lh_given_feature);
    if (lh_gather_is_on(&engine->opts)) {
        LH_TRY(lh_gather_create(engine, err));
        feature_add(engine, &lh_gather_feature);
    }
    return 0;
}

static int features_resume(struct lh_engine *engine, struct lh_error *err)
{
    for (uint32_t i = 0; i < engine->features.count; i++) {
        if (engine->features.all[i]->resumed)
            LH_TRY(engine->features.all[i]->resumed(engine, err));
    }
    return 0;
}

static void features_destroy(struct lh_engine *engine)
{
    lh_gather_destroy(engine);
    lh_borrow_destroy(engine);
    lh_saved_destroy(engine);
    lh_norm_destroy(engine);
    lh_orthogonal_destroy(engine);
    lh_spill_destroy(engine);
    lh_defer_destroy(engine);
    lh_idle_destroy(engine);
    lh_in_place_destroy(engine);
    if (!engine->dev)
        return;
    lh_device_destroy(engine);
    lh_sum_destroy(engine);
    lh_tail_destroy(engine);
    lh_landing_destroy(engine);
}

int lh_engine_create(const struct lh_engine_opts *opts, struct lh_alloc *alloc,
                     struct lh_engine **engine_out, struct lh_error *err)
{
    *engine_out = NULL;
    LH_TRY(opts_validate(opts, err));
    LH_ASSERT(opts->store && opts->io && opts->exec && opts->memory);
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
    engine->fork_count = lh_thread_fork_count();
    engine->io = opts->io;
    engine->exec = opts->exec;
    engine->dev = opts->dev;
    engine->copies_units = opts->dev && !opts->units_in_memory;
    engine->waker = opts->waker;
    engine->clock = opts->clock;
    engine->region = opts->team ? opts->team->region : opts->memory;
    engine->slab_memory = opts->memory + (opts->team ? 0 : opts->budget->region_bytes);
    engine->param_count = opts->param_count;
    engine->gradient_scales[0] = 1.0;
    engine->gradient_scales[1] = 1.0;
    shared_init(engine);
    int rc = lh_ring_init(&engine->inbox, alloc, LH_INBOX_CELL_COUNT, err);
    if (rc == 0)
        rc = tables_create(engine, opts, err);
    if (rc == 0)
        rc = lh_transfer_create(engine, err);
    if (rc == 0)
        rc = lh_in_place_create(engine, err);
    if (rc == 0 && lh_engine_is_mate(engine))
        rc = lh_borrow_create(engine, err);
    if (rc == 0)
        rc = lh_region_create_all(engine, err);
    if (rc == 0)
        rc = lh_chunk_create(engine, err);
    if (rc == 0)
        rc = lh_slab_create(engine, err);
    if (rc == 0)
        rc = lh_update_create(engine, err);
    if (rc == 0)
        rc = features_create(engine, err);
    if (rc == 0)
        rc = resume(engine, err);
    if (rc == 0)
        rc = features_resume(engine, err);
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
    if (!engine->has_thread || engine->fork_count != lh_thread_fork_count())
        return;
    pthread_mutex_lock(&engine->shared.mutex);
    atomic_store(&engine->stopping, true);
    pthread_cond_broadcast(&engine->shared.changed);
    pthread_mutex_unlock(&engine->shared.mutex);
    lh_waker_wake(engine->waker);
    pthread_join(engine->thread, NULL);
    engine->has_thread = false;
    if (lh_gather_is_on(&engine->opts))
        lh_gather_stop(engine);
    if (lh_engine_is_mate(engine))
        lh_borrow_stop(engine);
}

static void tables_destroy(struct lh_engine *engine)
{
    struct lh_alloc *alloc = engine->alloc;
    void *const tables[] = {
        engine->units,     engine->descs,          engine->parts,
        engine->params,    engine->gradient_steps, engine->gradients,
        engine->hypers[0], engine->hypers[1],      engine->commit_requests,
        engine->trace,     engine->chunks,         engine->scalars,
        engine->in_place,  engine->saved,          engine->sums,
        engine->gather,    engine->idle,           engine->device,
        engine->reading,   engine->tail,           engine->mates,
        engine->borrow,    engine->landing,        engine->copies,
        engine->unified,   engine->defer,          engine->spill,
        engine->norm,      engine->split,          engine->orthogonal,
        engine->repeat,
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
    features_destroy(engine);
    lh_update_destroy(engine);
    lh_slab_destroy(engine);
    lh_transfer_destroy(engine);
    tables_destroy(engine);
    lh_region_destroy_all(engine);
    if (engine->inbox.cells)
        lh_ring_deinit(&engine->inbox, alloc);
    pthread_cond_destroy(&engine->shared.changed);
    pthread_mutex_destroy(&engine->shared.mutex);
    lh_free(alloc, engine);
}
