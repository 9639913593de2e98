#include "sched/unit.h"

#include <string.h>

#include "sched/engine_private.h"

void lh_unit_state_set(struct lh_unit *unit, enum lh_unit_state state)
{
    LH_ASSERT(lh_states_may(lh_states_unit, (int)unit->state, (int)state));
    unit->state = state;
}

bool lh_unit_is_stale(const struct lh_engine *engine, const struct lh_unit *unit)
{
    bool is_due = unit->update.is_queued || engine->step_state == LH_STEP_STATE_CLOSED;
    bool is_pending = unit->update.gradient_count > 0 && is_due &&
                      unit->update.chunks_computed < unit->chunk_count;
    bool is_owing = LH_FEATURE_ANY(engine, unit_is_owing, unit);
    return is_pending || is_owing;
}

/*
 * Fail the engine: a checkpoint recomputes a block and reads a unit without differentiating it
 * (no_grad, detach), which keeps no handle. Other uses of the unit gave all of its gradients, and
 * its update is queued, so this step's values are no longer available.
 */
static void stale_fail(struct lh_engine *engine, uint32_t index)
{
    struct lh_error err = {0};
    lh_error_set(&err, -ESTALE,
                 "unit %u is read in backward after all its gradients arrived and its update "
                 "began. If a hook runs the model several times in one backward (a cached "
                 "contrastive loss), use gradient_accumulation_steps=\"manual\", which sums their "
                 "gradients. If several reentrant checkpoints use it, pass them "
                 "use_reentrant=False. If another "
                 "checkpoint reads it without differentiating it, use schedule=\"deferred\", "
                 "whose updates wait for step()",
                 index);
    lh_core_fail(engine, &err);
}

void lh_unit_grant(struct lh_engine *engine, struct lh_unit *unit)
{
    /* A thread that waits for a unit with a pending update waits for the updated values. */
    uint32_t pins = lh_unit_is_stale(engine, unit) ? 0 : unit->waiter_count;
    unit->waiter_count -= pins;
    LH_ASSERT(atomic_load(&unit->shared.word) == 0); /* no thread can have pinned the unit */
    atomic_store(&unit->shared.word, LH_UNIT_READY_BIT | pins);
    if (pins > 0) {
        atomic_fetch_add(&unit->shared.grants, pins);
        lh_core_notify(engine);
    }
}

void lh_unit_make_ready(struct lh_engine *engine, struct lh_unit *unit)
{
    lh_unit_state_set(unit, LH_UNIT_STATE_READY);
    if (!engine->copies_units)
        lh_unit_grant(engine, unit);
    LH_FEATURE_CALL(engine, unit_ready, unit);
}

void lh_unit_arrived(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(unit->state == LH_UNIT_STATE_LOADING);
    atomic_fetch_add(&unit->shared.load_count, 1); /* this must precede the grant */
    unit->copy.host_matches_write_back = false;
    lh_unit_make_ready(engine, unit);
    lh_update_consider(engine, (uint32_t)(unit - engine->units));
}

void lh_unit_load_cancel(struct lh_unit *unit)
{
    LH_ASSERT(unit->waiter_count == 0 && unit->source->ops->load);
    lh_unit_state_set(unit, LH_UNIT_STATE_ABSENT);
}

static void load_done(struct lh_engine *engine, struct lh_transfer *transfer)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, transfer->unit);
    LH_ASSERT(transfer == &unit->load && unit->state == LH_UNIT_STATE_LOADING);
    if (unit->source->ops->loaded)
        unit->source->ops->loaded(engine, transfer);
    if (unit->source->ops->complete)
        unit->source->ops->complete(engine, unit);
    else
        lh_unit_arrived(engine, unit);
}

/* The training thread pinned a READY unit (USE) or waits for a pin (ACQUIRE): a use begins. */
static void use_begin(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    if (!unit->use_is_open) {
        LH_FEATURE_CALL(engine, use_begun, index);
        lh_region_event(engine, index, LH_RESIDENCY_EVENT_BEGIN);
        unit->use_is_open = true;
        unit->use_started_ns = lh_core_now(engine);
    }
}

void lh_unit_use(struct lh_engine *engine, uint32_t index)
{
    use_begin(engine, index);
}

void lh_unit_acquire(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    if (engine->step_state == LH_STEP_STATE_OPEN && unit->update.is_queued) {
        stale_fail(engine, index);
        return;
    }
    LH_FEATURE_CALL(engine, unit_asked, unit);
    use_begin(engine, index);
    bool is_here = engine->copies_units ? lh_unit_copy_is_here(&unit->copy)
                                        : unit->state == LH_UNIT_STATE_READY;
    if (is_here && !lh_unit_is_stale(engine, unit)) {
        LH_ASSERT(atomic_load(&unit->shared.word) & LH_UNIT_READY_BIT);
        atomic_fetch_add(&unit->shared.word, 1);
        atomic_fetch_add(&unit->shared.grants, 1);
        lh_core_notify(engine);
        return;
    }
    unit->waiter_count++;
    if (unit->state == LH_UNIT_STATE_LOADING)
        lh_transfer_raise(engine, &unit->load);
}

/*
 * The last pin was dropped. Whether the unit was pinned again in the meantime depends on timing,
 * which must not affect what is recorded: always record the end of a use and, if the unit is pinned
 * again, another use.
 */
void lh_unit_release(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    if (unit->use_is_open) {
        lh_region_event(engine, index, LH_RESIDENCY_EVENT_END);
        unit->use_is_open = false;
        lh_core_trace_add(engine, (struct lh_engine_trace_event){
                                      .kind = LH_ENGINE_TRACE_USE,
                                      .unit = index,
                                      .start_ns = unit->use_started_ns,
                                      .end_ns = lh_core_now(engine),
                                  });
        if (lh_unit_pins(unit) > 0 || unit->waiter_count > 0)
            use_begin(engine, index);
    }
    lh_update_consider(engine, index);
}

bool lh_unit_is_awaited(const struct lh_engine *engine, const struct lh_unit *unit)
{
    bool is_copied =
        engine->copies_units && lh_unit_copy_is_placed(&unit->copy) && !unit->copy.is_stale;
    bool is_to_be_read = LH_FEATURE_ANY(engine, unit_is_awaited, unit);
    return (unit->waiter_count > 0 && !is_copied) || is_to_be_read;
}

bool lh_unit_claim_host(struct lh_engine *engine, struct lh_unit *unit)
{
    bool is_read = LH_FEATURE_ANY(engine, unit_is_read, unit);
    is_read |= engine->copies_units ? unit->copy.is_copying : lh_unit_pins(unit) > 0;
    if (is_read)
        return false;
    bool may_claim = LH_FEATURE_ALL(engine, unit_may_claim, unit);
    if (!may_claim || engine->copies_units)
        return may_claim;
    if (lh_unit_claim(unit)) {
        bool is_over = LH_FEATURE_ALL(engine, unit_is_unread, unit);
        if (is_over)
            return true;
        atomic_store(&unit->shared.word, LH_UNIT_READY_BIT);
    }
    LH_FEATURE_CALL(engine, unit_ready, unit); /* it is still read, or was pinned meanwhile */
    return false;
}

/* The unit's bytes are not in main memory any more. */
static void absent_set(struct lh_engine *engine, struct lh_unit *unit)
{
    lh_unit_state_set(unit, LH_UNIT_STATE_ABSENT);
    if (unit->source->ops->evicted)
        unit->source->ops->evicted(engine, unit);
}

bool lh_unit_try_forget(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    LH_ASSERT(unit->state == LH_UNIT_STATE_READY);
    if (!lh_unit_claim_host(engine, unit))
        return false;
    absent_set(engine, unit);
    return true;
}

void lh_unit_forget(struct lh_engine *engine, uint32_t index)
{
    bool is_forgotten = lh_unit_try_forget(engine, index);
    LH_ASSERT(is_forgotten);
}

static bool evict_is_possible(const struct lh_engine *engine, const struct lh_residency_op *op)
{
    const struct lh_unit *unit = &engine->units[op->unit];
    return unit->state == LH_UNIT_STATE_READY && unit->use_count >= op->uses_before &&
           !lh_unit_is_awaited(engine, unit) && (!unit->update.is_queued || unit->update.is_done);
}

static void load_start(struct lh_engine *engine, const struct lh_residency_op *op, uint64_t step)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, op->unit);
    LH_ASSERT(unit->state == LH_UNIT_STATE_ABSENT);
    LH_ASSERT(op->offset + unit->desc->bytes <= engine->budget.region_bytes);
    lh_unit_state_set(unit, LH_UNIT_STATE_LOADING);
    unit->offset = op->offset;
    unit->memory = engine->region + op->offset;
    if (unit->source->ops->load) {
        unit->source->ops->load(engine, unit, step);
        return;
    }
    uint32_t slot = lh_store_read_slot(engine->store, unit->desc->store_group);
    uint64_t first = lh_unit_load_first(unit);
    unit->load = (struct lh_transfer){
        .source = unit->source,
        .done = load_done,
        .kind = LH_IO_KIND_READ,
        .priority = lh_unit_is_awaited(engine, unit) ? LH_PRIORITY_DEMAND : LH_PRIORITY_PREFETCH,
        .link = LH_ENGINE_LINK_PARAM_READ,
        .unit = op->unit,
        .slab = LH_CHUNK_NONE,
        .step = step,
        .extent = unit->desc->param_extent,
        .slot = slot,
        .offset = first,
        .bytes = unit->desc->bytes - first,
        .buffer = unit->memory + first,
    };
    lh_transfer_submit(engine, &unit->load);
}

bool lh_unit_pump(struct lh_engine *engine)
{
    struct lh_region *region = &engine->host_region;
    bool moved = lh_region_catch_up(engine);
    while (region->op_first < region->op_count) {
        const struct lh_residency_op *op = &region->ops[region->op_first];
        if (op->kind == LH_RESIDENCY_OP_LOAD) {
            load_start(engine, op, region->op_steps[region->op_first]);
        } else {
            struct lh_unit *unit = lh_engine_unit_at(engine, op->unit);
            LH_ASSERT(op->kind == LH_RESIDENCY_OP_EVICT);
            if (!evict_is_possible(engine, op) || !lh_unit_claim_host(engine, unit))
                break;
            /* a unit with dirty P has a place of its own */
            LH_ASSERT(!unit->update.is_param_dirty);
            absent_set(engine, unit);
        }
        region->op_first++;
        moved = true;
    }
    return moved;
}

struct lh_unit_state_place lh_unit_state_place(const struct lh_unit *unit, uint32_t array,
                                               uint64_t first, uint64_t count)
{
    const struct lh_unit_state_array *states = &unit->states[array];
    struct lh_unit_state_place place = {states->extent, 0, lh_unit_state_bytes(states, count)};
    if (states->shift > 0) {
        LH_ASSERT(first / LH_ADAM_SCALES_ELEMENTS == (first + count - 1) / LH_ADAM_SCALES_ELEMENTS);
        place.extent += (uint32_t)(first / LH_ADAM_SCALES_ELEMENTS);
        first %= LH_ADAM_SCALES_ELEMENTS;
    }
    place.offset = lh_unit_state_bytes(states, first);
    return place;
}
