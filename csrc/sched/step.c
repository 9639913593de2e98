/*
 * Steps: the beginning, close, commit and abort of a step, the conditions for each, and the cleanup
 * after a step's updates.
 *
 * [Note: Held commits] Copying a store during training requires that its committed slots do not
 * change. The committed slots do not change until the next commit is durable, because every write
 * goes to the other slots; so it is enough that no commit begins. Everything that needs no commit
 * continues: the following steps overwrite the other slots, as between two commits with
 * commit_every=N. So a copy costs neither space nor extra writes. A commit that was due is late: it
 * happens with the first step that ends after the release.
 *
 *      NONE --[lh_engine_commit_hold]--> ASKED --[no commit is under way]--> GRANTED
 *        ^                                                                      |
 *        +---------------------[lh_engine_commit_release]-----------------------+
 *
 * Gradients that wait on SSD (spill.c) lie in the other slot, which therefore must not hold the
 * newest parameters. So if gradients are spilled, a step that is due to commit waits for the
 * release, and the training thread waits for that step before the next gradient. A failed step
 * cannot be rolled back while a commit is late, as is always the case between commits. With one
 * slot (commit_every="never") data is overwritten in place, and a hold guarantees nothing.
 */
#include <inttypes.h>
#include <string.h>

#include "sched/engine_private.h"

static void state_set(struct lh_engine *engine, enum lh_step_state state)
{
    LH_ASSERT(lh_states_may(lh_states_step, (int)engine->step_state, (int)state));
    engine->step_state = state;
}

void lh_step_begin(struct lh_engine *engine, enum lh_engine_mode mode)
{
    lh_region_begin(engine, mode);
    if (mode != LH_ENGINE_MODE_TRAIN)
        return;
    LH_ASSERT(engine->plan_step == engine->step + 1);
    struct lh_engine_step_stats *stats = lh_core_stats(engine, engine->plan_step);
    stats->step = engine->plan_step;
    if (stats->begin_ns == 0)
        stats->begin_ns = lh_core_now(engine);
    lh_update_plan_begin(engine);
    if (lh_step_commits(engine, engine->plan_step))
        stats->planned_bytes[LH_ENGINE_LINK_COMMIT_WRITE] = lh_store_commit_bytes(engine->store);
}

void lh_step_close(struct lh_engine *engine)
{
    LH_ASSERT(engine->step_state == LH_STEP_STATE_OPEN);
    state_set(engine, LH_STEP_STATE_CLOSED);
    engine->step++;
    struct lh_engine_step_stats *stats = lh_core_stats(engine, engine->step);
    stats->step = engine->step;
    stats->close_ns = lh_core_now(engine);
    if (stats->begin_ns == 0)
        stats->begin_ns = stats->close_ns;
    lh_update_plan_correct(engine);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        lh_update_consider(engine, i);
    LH_FEATURE_CALL(engine, step_closed);
}

void lh_step_reopen(struct lh_engine *engine)
{
    LH_ASSERT(engine->step_state == LH_STEP_STATE_OPEN && engine->updates.count == 0);
    LH_ASSERT(engine->updates.gradient_unit_count == 0);
    atomic_store(&engine->is_reopened, true);
    state_set(engine, LH_STEP_STATE_CLOSED);
}

void lh_step_abort(struct lh_engine *engine)
{
    LH_ASSERT(engine->step_state == LH_STEP_STATE_OPEN);
    state_set(engine, LH_STEP_STATE_ABORTING);
}

void lh_step_repeat(struct lh_engine *engine)
{
    lh_step_abort(engine);
    engine->is_undoing = true;
}

/*
 * [Note: Averages of all steps] An average takes a step's parameter in the pass that updates it, so
 * a parameter without an update would be left out. If it has never been updated, this makes no
 * difference, because it is its own average. An idle unit's average takes the step when the unit is
 * settled ([Note: Idle units] in idle.h).
 */
static bool averages_check(struct lh_engine *engine)
{
    if (lh_engine_is_mate(engine)) /* its owner has the averages, and checks them */
        return true;
    for (uint32_t i = 0; i < engine->param_count; i++) {
        const struct lh_unit *unit = &engine->units[engine->params[i].unit];
        struct lh_error err = {0};
        LH_ASSERT(unit->update.gradient_count <= unit->desc->param_count);
        bool is_late = LH_FEATURE_ANY(engine, unit_is_owing, unit);
        if (is_late || unit->update.gradient_count == unit->desc->param_count)
            continue;
        if (unit->desc->average_extent == 0 || engine->gradients[i].pointer ||
            engine->param_steps[i] == 0)
            continue;
        lh_error_set(&err, -ENOMSG,
                     "param %u has no gradient in step %" PRIu64 ", but had one before: its"
                     " average (ema=) would not take this step",
                     i, engine->step);
        lh_core_fail(engine, &err);
        return false;
    }
    return true;
}

static void param_steps_advance(struct lh_engine *engine)
{
    struct lh_engine_step_stats *stats = lh_core_stats(engine, engine->step);
    stats->updated_params = 0;
    for (uint32_t i = 0; i < engine->param_count; i++) {
        if (!engine->gradients[i].pointer)
            continue;
        engine->param_steps[i]++;
        stats->updated_params++;
    }
}

/* Empty the queue of updates. */
static void queue_forget(struct lh_engine *engine)
{
    LH_ASSERT(engine->updates.done_count <= engine->updates.count);
    LH_ASSERT(engine->updates.chunks_busy == 0);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        unit->update.is_queued = false;
        unit->update.is_counted = false;
        unit->update.is_done = false;
        unit->update.chunks_computed = 0;
        unit->update.chunks_written = 0;
    }
    engine->updates.first = 0;
    engine->updates.count = 0;
    engine->updates.done_count = 0;
    lh_chunk_recount(engine);
}

/* Forget everything about the updates and gradients of a step that is over or rolled back. */
static void updates_forget(struct lh_engine *engine)
{
    LH_FEATURE_CALL(engine, step_forgotten);
    atomic_store(&engine->is_reopened, false);
    engine->is_repeated = false;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        engine->units[i].update.gradient_count = 0;
        engine->units[i].update.gradient_bytes = 0;
    }
    for (uint32_t i = 0; i < engine->param_count; i++)
        engine->gradients[i].pointer = NULL;
    engine->updates.gradient_unit_count = 0;
    queue_forget(engine);
}

/* Predict that the next step updates the same units. */
static void updates_predict(struct lh_engine *engine)
{
    struct lh_updates *updates = &engine->updates;
    updates->predicted_count = 0;
    for (uint32_t i = 0; i < updates->count && !updates->has_announced; i++)
        updates->predicted[updates->predicted_count++] = updates->queue[i];
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        unit->update.is_predicted = unit->update.is_queued && !unit->desc->is_announced;
    }
}

/* End the updates of the closed step: everything is written, and committed if a commit was due. */
static void updates_end(struct lh_engine *engine, const struct lh_engine_step_stats *stats)
{
    LH_ASSERT(engine->updates.done_count == engine->updates.count);
    if (!atomic_load(&engine->is_reopened))
        updates_predict(engine);
    /* Free the slabs of chunks that were read ahead for units that then had no gradients. */
    for (uint32_t i = engine->budget.kept_chunk_count; i < engine->budget.slab_count; i++) {
        if (engine->slabs[i].chunk != LH_CHUNK_NONE)
            lh_slab_clear(engine, &engine->slabs[i]);
    }
    LH_FEATURE_CALL(engine, step_over, stats);
    updates_forget(engine);
}

static void stats_publish(struct lh_engine *engine, const struct lh_engine_step_stats *stats)
{
    pthread_mutex_lock(&engine->shared.mutex);
    engine->shared.finished = *stats;
    engine->shared.has_finished = true;
    pthread_mutex_unlock(&engine->shared.mutex);
}

/*
 * A reopened step is over: what it moved counts for the open step, or for no step if no forward has
 * begun it; its commit counts for no step.
 */
static void reopened_stats_move(struct lh_engine *engine, const struct lh_engine_step_stats *stats)
{
    uint64_t next = engine->step + 1;
    LH_ASSERT(stats->updated_params == 0);
    bool has_begun = lh_core_stats(engine, next)->begin_ns > 0;
    struct lh_engine_step_stats *target = lh_core_stats(engine, has_begun ? next : 0);
    LH_ASSERT(target != stats);
    for (uint32_t i = 0; i < LH_ENGINE_LINK_COUNT; i++) {
        if (i == LH_ENGINE_LINK_COMMIT_WRITE) /* the open step's plan has its own commit only */
            continue;
        target->bytes[i] += stats->bytes[i];
        target->planned_bytes[i] += stats->planned_bytes[i];
    }
    target->update_busy_ns += stats->update_busy_ns;
    target->ssd_busy_ns += stats->ssd_busy_ns;
    target->commit_ns += stats->commit_ns;
}

static void step_over(struct lh_engine *engine)
{
    struct lh_engine_step_stats *stats = lh_core_stats(engine, engine->step);
    LH_ASSERT(engine->commit_in_flight == 0);
    lh_transfer_step_over(engine, stats);
    LH_FEATURE_CALL(engine, stats_correct, stats);
    stats->end_ns = lh_core_now(engine);
    const bool is_reopened = atomic_load(&engine->is_reopened);
    if (is_reopened)
        reopened_stats_move(engine, stats);
    else
        stats_publish(engine, stats);
    updates_end(engine, stats);
    memset(stats, 0, sizeof(*stats));
    /* the default for the step after the open step */
    engine->gradient_scales[engine->step % 2] = 1.0;
    state_set(engine, LH_STEP_STATE_OPEN);
    if (is_reopened)
        lh_core_notify(engine);
    else
        lh_request_reply(engine, LH_REQUEST_CLOSE);
}

bool lh_step_holds_commits(const struct lh_engine *engine)
{
    return atomic_load(&engine->holds_commits) &&
           !lh_request_is_pending(&engine->requests[LH_REQUEST_HOLD]);
}

/* Grant a requested hold, on the thread that begins commits: no commit begins after the grant. */
static bool hold_pump(struct lh_engine *engine)
{
    if (engine->step_state == LH_STEP_STATE_COMMITTING ||
        !lh_request_is_pending(&engine->requests[LH_REQUEST_HOLD]))
        return false;
    lh_request_reply(engine, LH_REQUEST_HOLD);
    return true;
}

static bool is_due(const struct lh_engine *engine)
{
    return lh_step_commits(engine, engine->step) || engine->commit_is_late;
}

bool lh_step_is_held(const struct lh_engine *engine)
{
    bool may_skip = LH_FEATURE_ALL(engine, step_may_skip_commit);
    return engine->step_state == LH_STEP_STATE_CLOSED && !may_skip && is_due(engine) &&
           lh_step_holds_commits(engine);
}

static void commit_request_done(struct lh_engine *engine, struct lh_io_request *request)
{
    LH_ASSERT(engine->commit_in_flight > 0);
    LH_ASSERT(engine->step_state == LH_STEP_STATE_COMMITTING);
    lh_transfer_busy_end(engine);
    engine->commit_in_flight--;
    /* lh_store_commit_next() reports failures, because their meaning depends on the phase. */
    if (request->kind == LH_IO_KIND_WRITE && !engine->commit_is_of_flush)
        lh_core_stats(engine, engine->step)->bytes[LH_ENGINE_LINK_COMMIT_WRITE] += request->bytes;
}

static void commit_begin(struct lh_engine *engine, bool is_of_flush)
{
    struct lh_error err = {0};
    LH_ASSERT(engine->commit_in_flight == 0 && engine->updates.chunks_busy == 0);
    LH_ASSERT(engine->scalar_bytes <= engine->scalar_bytes_max);
    engine->commit_is_late = false;
    if (lh_store_commit_begin(engine->store, engine->step, engine->scalars, engine->scalar_bytes,
                              &err) < 0) {
        lh_core_fail(engine, &err);
        return;
    }
    engine->commit_is_of_flush = is_of_flush;
    engine->commit_owner.done = commit_request_done;
    engine->commit_started_ns = lh_core_now(engine);
    state_set(engine, LH_STEP_STATE_COMMITTING);
}

static void commit_done(struct lh_engine *engine)
{
    uint64_t now = lh_core_now(engine);
    bool is_of_flush = engine->commit_is_of_flush;
    LH_ASSERT(engine->step_state == LH_STEP_STATE_COMMITTING && engine->commit_in_flight == 0);
    lh_core_trace_add(engine, (struct lh_engine_trace_event){
                                  .kind = LH_ENGINE_TRACE_COMMIT,
                                  .unit = LH_CHUNK_NONE,
                                  .start_ns = engine->commit_started_ns,
                                  .end_ns = now,
                              });
    engine->committed_step = engine->step;
    engine->has_edits = false;
    engine->reopened_uncommitted = false;
    if (is_of_flush) {
        state_set(engine, LH_STEP_STATE_OPEN);
        engine->commit_is_of_flush = false;
        return;
    }
    lh_core_stats(engine, engine->step)->commit_ns += now - engine->commit_started_ns;
    step_over(engine);
}

/* Start the next phase of a commit once the previous one has ended. */
static bool commit_pump(struct lh_engine *engine)
{
    struct lh_error err = {0};
    if (engine->commit_in_flight > 0)
        return false;
    int count = lh_store_commit_next(engine->store, engine->commit_requests,
                                     LH_STORE_COMMIT_REQUEST_COUNT_MAX, &err);
    if (count < 0) {
        lh_core_fail(engine, &err);
        return true;
    }
    if (count == 0) {
        commit_done(engine);
        return true;
    }
    LH_ASSERT(count <= LH_STORE_COMMIT_REQUEST_COUNT_MAX);
    for (int i = 0; i < count; i++) {
        engine->commit_requests[i].owner = &engine->commit_owner;
        lh_transfer_busy_begin(engine);
        engine->commit_in_flight++;
        int rc = engine->io->ops->submit(engine->io, &engine->commit_requests[i]);
        LH_ASSERT(rc == 0); /* the I/O queue has room beyond io_depth for requests of all files */
    }
    if (engine->io->ops->flush)
        engine->io->ops->flush(engine->io);
    return true;
}

static bool transfers_are_idle(const struct lh_engine *engine)
{
    bool are_features_idle = LH_FEATURE_ALL(engine, is_idle);
    return are_features_idle && lh_transfer_is_idle(engine) && engine->jobs_in_flight == 0 &&
           lh_copy_in_flight(engine) == 0;
}

/* Whether the unit's update has changed its bytes in memory. */
static bool update_has_begun(const struct lh_engine *engine, const struct lh_unit *unit)
{
    bool has_begun = LH_FEATURE_ANY(engine, update_has_begun, unit);
    return has_begun || unit->update.chunks_computed > 0;
}

/*
 * A unit that an update has changed and that cannot be rolled back, because it is pinned; or NULL.
 */
static const struct lh_unit *lent_update(const struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->updates.count; i++) {
        const struct lh_unit *unit = &engine->units[engine->updates.queue[i]];
        if (update_has_begun(engine, unit) && lh_unit_pins(unit) > 0)
            return unit;
    }
    return NULL;
}

/* Whether an update of the open step has changed bytes, at least in memory. */
static bool is_changed(const struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->updates.count; i++) {
        const struct lh_unit *unit = &engine->units[engine->updates.queue[i]];
        if (update_has_begun(engine, unit))
            return true;
        for (uint32_t j = 0; j < unit->chunk_count; j++) {
            if (engine->chunks[unit->chunk_first + j].computed_step == engine->step + 1)
                return true;
        }
    }
    return false;
}

void lh_step_forget_unit(struct lh_engine *engine, uint32_t index)
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

/* Discard the bytes of every unit that an update has touched. Nothing may be in flight. */
static void updates_undo(struct lh_engine *engine)
{
    LH_ASSERT(engine->step_state == LH_STEP_STATE_ABORTING);
    for (uint32_t i = 0; i < engine->updates.count; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, engine->updates.queue[i]);
        if (!update_has_begun(engine, unit)) { /* unchanged: keep it, as it may be dirty */
            if (unit->state == LH_UNIT_STATE_UPDATING)
                lh_unit_make_ready(engine, unit);
            continue;
        }
        lh_step_forget_unit(engine, engine->updates.queue[i]);
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
}

/* Discard the open step: its updates, its gradients and its counters. */
static void step_discard(struct lh_engine *engine)
{
    LH_ASSERT(!engine->is_undoing);
    updates_undo(engine);
    for (uint32_t i = 0; i < engine->param_count; i++)
        lh_gradient_release(engine, i);
    atomic_store(&engine->update_gradient_bytes, 0);
    updates_forget(engine);
    lh_region_forget(engine);
    engine->gradient_scales[(engine->step + 1) % 2] = 1.0;
    memset(lh_core_stats(engine, engine->step + 1), 0, sizeof(struct lh_engine_step_stats));
}

/* Undo the open step's updates, which run again after the close: what they moved stays counted. */
static void step_undo(struct lh_engine *engine)
{
    static const enum lh_engine_link links[] = {
        LH_ENGINE_LINK_STATE_READ, LH_ENGINE_LINK_STATE_WRITE, LH_ENGINE_LINK_PARAM_WRITE};
    struct lh_engine_step_stats *stats = lh_core_stats(engine, engine->step + 1);
    LH_ASSERT(engine->is_undoing);
    updates_undo(engine);
    LH_FEATURE_CALL(engine, step_undone);
    queue_forget(engine);
    lh_region_discard(engine);
    /* The close plans the second run, and all that gradients have moved. */
    for (size_t i = 0; i < LH_COUNT_OF(links); i++)
        stats->planned_bytes[links[i]] = stats->bytes[links[i]];
    stats->planned_bytes[LH_ENGINE_LINK_GRADIENT_WRITE] = 0;
    stats->planned_bytes[LH_ENGINE_LINK_COPY_OUT] = 0;
    engine->is_repeated = true;
}

static void abort_finish(struct lh_engine *engine)
{
    const char *what =
        engine->is_undoing ? "has to be repeated with another factor" : "failed partway";
    LH_ASSERT(engine->step_state == LH_STEP_STATE_ABORTING && transfers_are_idle(engine));
    bool has_updates = is_changed(engine);
    /* With one slot an update overwrites the committed bytes. */
    bool is_recoverable = engine->committed_step == engine->step && !engine->has_edits &&
                          !engine->reopened_uncommitted &&
                          engine->opts.commit_every != LH_ENGINE_COMMIT_NEVER;
    const struct lh_unit *lent = lent_update(engine);
    int result = 0;
    if (lent && is_recoverable) {
        struct lh_error err = {0};
        result = -ENOTRECOVERABLE;
        lh_error_set(&err, result,
                     "step %" PRIu64 " %s and cannot be rolled back here: tensors are "
                     "still views of unit %u, which it has updated; reopen the store with "
                     "resume=True to continue from step %" PRIu64,
                     engine->step + 1, what, (unsigned)(lent - engine->units),
                     engine->committed_step);
        lh_core_fail(engine, &err);
    } else if (has_updates && engine->opts.commit_every == LH_ENGINE_COMMIT_NEVER) {
        struct lh_error err = {0};
        result = -ENOTRECOVERABLE;
        lh_error_set(&err, result,
                     "step %" PRIu64 " failed partway, and the store keeps one slot "
                     "(commit_every=\"never\"): parameters and states are a mix of step %" PRIu64
                     " and step %" PRIu64 " and cannot be recovered; use commit_every=1 to "
                     "be able to roll back",
                     engine->step + 1, engine->step, engine->step + 1);
        lh_core_fail(engine, &err);
    } else if (has_updates && !is_recoverable) {
        struct lh_error err = {0};
        result = -ENOTRECOVERABLE;
        lh_error_set(
            &err, result,
            "step %" PRIu64 " %s, and all changes since the last commit (step %" PRIu64
            ") are in the same slot%s: reopen the store with resume=True to continue from step"
            " %" PRIu64 "%s",
            engine->step + 1, what, engine->committed_step,
            engine->commit_is_late ? ", because a snapshot in progress held back the commits" : "",
            engine->committed_step,
            engine->opts.commit_every > 1 ? ", and use commit_every=1 to be able to roll back one"
                                            " step"
                                          : "");
        lh_core_fail(engine, &err);
    } else {
        if (has_updates)
            lh_store_rollback(engine->store);
        if (engine->is_undoing)
            step_undo(engine);
        else
            step_discard(engine);
    }
    state_set(engine, LH_STEP_STATE_OPEN);
    atomic_store(&engine->abort_result, result);
    lh_request_reply(engine, engine->is_undoing ? LH_REQUEST_REPEAT : LH_REQUEST_ABORT);
    engine->is_undoing = false;
}

bool lh_step_is_quiet(const struct lh_engine *engine)
{
    return engine->step_state == LH_STEP_STATE_OPEN && transfers_are_idle(engine) &&
           engine->commit_in_flight == 0 && engine->updates.chunks_busy == 0 &&
           engine->updates.done_count == engine->updates.count;
}

static bool flush_pump(struct lh_engine *engine)
{
    /*
     * An update of the open step that is in progress is finished first; one that has not begun
     * waits for the step's close.
     */
    if (!engine->flush_is_asked || !lh_step_is_quiet(engine))
        return false;
    if (lh_write_back_dirty(engine, 0))
        return true;
    bool is_newer = engine->committed_step < engine->step || engine->reopened_uncommitted;
    bool is_asked = engine->flush_commits && is_newer && engine->updates.count == 0;
    if (is_asked && lh_step_holds_commits(engine))
        return false;
    if (is_asked) {
        commit_begin(engine, true);
        return true;
    }
    engine->flush_is_asked = false;
    lh_request_reply(engine, LH_REQUEST_FLUSH);
    return true;
}

/* Once everything of the closed step is written, commit it if a commit is due; otherwise end it. */
static bool closed_pump(struct lh_engine *engine)
{
    uint64_t *planned_bytes = lh_core_stats(engine, engine->step)->planned_bytes;
    const bool is_reopened = atomic_load(&engine->is_reopened);
    bool is_changed_again = is_reopened && engine->updates.gradient_unit_count > 0;
    bool commits = is_due(engine) && (is_changed_again || !is_reopened);
    if (engine->updates.count < engine->updates.gradient_unit_count ||
        engine->updates.done_count < engine->updates.count)
        return false;
    /*
     * Wait for this step's transfers, including reads ahead for uses or updates that never
     * happened.
     */
    if (engine->transfers.step_counts[engine->step % 2] > 0)
        return false;
    bool may_end = LH_FEATURE_ALL(engine, step_may_end);
    if (engine->updates.chunks_busy > 0 || !may_end)
        return false; /* dirty data is being written, or the scalars are not complete */
    if (commits && lh_step_holds_commits(engine)) {
        bool may_skip = LH_FEATURE_ALL(engine, step_may_skip_commit);
        if (!may_skip)
            return false;
        commits = false;
        engine->commit_is_late = true;
    }
    if (!is_reopened && !averages_check(engine))
        return true;
    if (commits && lh_write_back_dirty(engine, engine->step))
        return true;
    planned_bytes[LH_ENGINE_LINK_COMMIT_WRITE] = commits ? lh_store_commit_bytes(engine->store) : 0;
    lh_region_step_end(engine);
    param_steps_advance(engine);
    LH_FEATURE_CALL(engine, steps_advanced);
    if (is_changed_again)
        engine->reopened_uncommitted = !commits;
    if (commits)
        commit_begin(engine, false);
    else
        step_over(engine);
    return true;
}

bool lh_step_pump(struct lh_engine *engine)
{
    bool moved = hold_pump(engine);
    switch (engine->step_state) {
    case LH_STEP_STATE_OPEN:
        return flush_pump(engine) || moved;
    case LH_STEP_STATE_CLOSED:
        return closed_pump(engine) || moved;
    case LH_STEP_STATE_COMMITTING:
        return commit_pump(engine) || moved;
    case LH_STEP_STATE_ABORTING:
        if (!transfers_are_idle(engine))
            break;
        abort_finish(engine);
        return true;
    }
    return moved;
}
