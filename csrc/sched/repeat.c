/*
 * Clipping that does not wait for the norm.
 *
 * The factor by which clipping multiplies a step's gradients is known once all of them are there.
 * Instead of waiting, each update runs when its unit's gradients are there, with the factor 1. If
 * that was the factor, the step is closed, and nothing else happens. Otherwise the caller has the
 * step repeated: everything that its updates did is undone, as for a step that is discarded
 * (step.c), but the gradients stay; the updates run again after the close, with the factor.
 *
 *      gradients -> update -> gradients stay -> close: released
 *                                            -> repeat: undo -> close: update again -> released
 *
 * Undoing is exact, because updates write to the slots that no commit needs and are not committed
 * before the close: the old values are read again from the other slots. So every step has to
 * commit, and no step may end without a commit that is due. States that memory keeps are read
 * again, too: they were changed in place.
 *
 * Until the close, gradients stay in main memory where there is room, and on SSD otherwise
 * ([Note: Gradients apart] in spill.c).
 *
 * An update that would be refused because of a NaN is refused at the close, if it is not repeated
 * or discarded before: only the norm tells whether its gradients are finite.
 *
 * None of the papers clips gradients.
 */
#include "sched/repeat.h"

#include "sched/engine_private.h"

/* Release the gradients of a unit that is updated, and where a feature has put them. */
static void kept_release(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(unit->update.chunks_computed == unit->chunk_count);
    unit->parts->repeat.is_kept = false;
    unit->update.gradient_bytes = 0; /* they no longer count as held: unit_computed() */
    lh_gradient_release_unit(engine, unit);
    for (uint32_t i = 0; i < unit->chunk_count; i++)
        LH_FEATURE_CALL(engine, chunk_consumed, &engine->chunks[unit->chunk_first + i]);
}

/* Until the close, except in the second run of a step's updates. */
static bool gradients_stay(const struct lh_engine *engine, const struct lh_unit *unit)
{
    LH_ASSERT(engine->step_state != LH_STEP_STATE_COMMITTING && unit->update.gradient_count > 0);
    return engine->step_state != LH_STEP_STATE_CLOSED;
}

static void unit_computed(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(unit->update.chunks_computed == unit->chunk_count);
    if (!gradients_stay(engine, unit))
        return;
    LH_ASSERT(unit->update.is_counted && !engine->is_repeated);
    LH_ASSERT(!unit->parts->repeat.is_kept);
    if (unit->parts->spill.state != LH_SPILL_STATE_NONE) /* spill.c releases them */
        return;
    unit->parts->repeat.is_kept = true;
    /* They wait now, in memory that the budget has for that; no update in progress holds them. */
    lh_gradient_unhold(engine, unit->update.gradient_bytes);
    lh_core_notify(engine);
}

static bool update_may_queue(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(!unit->update.is_queued);
    return !lh_repeat_waits(engine) || engine->step_state == LH_STEP_STATE_CLOSED;
}

static bool refusal_waits(struct lh_engine *engine, const struct lh_error *err)
{
    LH_ASSERT(err->code < 0);
    if (engine->step_state == LH_STEP_STATE_CLOSED)
        return false;
    if (engine->repeat->refusal.code == 0)
        engine->repeat->refusal = *err;
    return true;
}

static void step_closed(struct lh_engine *engine)
{
    LH_ASSERT(engine->step_state == LH_STEP_STATE_CLOSED);
    if (engine->repeat->refusal.code < 0) {
        lh_core_fail(engine, &engine->repeat->refusal);
        return;
    }
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        if (engine->units[i].parts->repeat.is_kept)
            kept_release(engine, &engine->units[i]);
    }
}

static void step_forgotten(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        engine->units[i].parts->repeat.is_kept = false;
    engine->repeat->refusal = (struct lh_error){0};
}

/* No update holds gradients any more; those that have not landed still count. */
static void step_undone(struct lh_engine *engine)
{
    LH_ASSERT(engine->step_state == LH_STEP_STATE_ABORTING && engine->is_undoing);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        if (unit->update.is_counted && !unit->parts->repeat.is_kept)
            lh_gradient_unhold(engine, unit->update.gradient_bytes);
    }
    step_forgotten(engine);
}

/* A step that ends without its commit leaves nothing to which the next one can be undone. */
static bool step_may_skip_commit(const struct lh_engine *engine)
{
    (void)engine;
    return false;
}

static bool message(struct lh_engine *engine, const struct lh_ring_message *message)
{
    if (message->words[0] != LH_MESSAGE_REPEAT)
        return false;
    lh_step_repeat(engine);
    return true;
}

bool lh_repeat_waits(const struct lh_engine *engine)
{
    return engine->repeat && (engine->is_repeated || atomic_load(&engine->repeat->waits));
}

void lh_repeat_wait_set(struct lh_engine *engine, bool waits)
{
    LH_ASSERT(engine->repeat);
    atomic_store(&engine->repeat->waits, waits);
}

int lh_repeat(struct lh_engine *engine, int timeout_ms)
{
    LH_ASSERT(engine->repeat && !lh_request_is_pending(&engine->requests[LH_REQUEST_CLOSE]));
    if (atomic_load(&engine->failed))
        return lh_core_fail_code(engine);
    if (lh_request_is_pending(&engine->requests[LH_REQUEST_REPEAT])) {
        lh_request_join(engine, LH_REQUEST_REPEAT);
    } else if (!lh_request_is_current(engine, LH_REQUEST_REPEAT)) {
        lh_request_send(engine, LH_REQUEST_REPEAT);
        lh_engine_post(engine, LH_MESSAGE_REPEAT, 0, 0, 0);
    }
    int rc = lh_request_wait(engine, LH_REQUEST_REPEAT, timeout_ms);
    /* A repetition that is not possible has failed the engine. */
    return rc > 0 && atomic_load(&engine->failed) ? lh_core_fail_code(engine) : rc;
}

int lh_repeat_create(struct lh_engine *engine, struct lh_error *err)
{
    return LH_ENGINE_PART_CREATE(engine, repeat, err);
}

const struct lh_feature lh_repeat_feature = {
    .name = "repeat",
    .message = message,
    .update_may_queue = update_may_queue,
    .gradients_stay = gradients_stay,
    .refusal_waits = refusal_waits,
    .unit_computed = unit_computed,
    .step_closed = step_closed,
    .step_may_skip_commit = step_may_skip_commit,
    .step_undone = step_undone,
    .step_forgotten = step_forgotten,
};
