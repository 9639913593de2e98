/* Units: the plan of the step, loads and evictions, and the pins that training threads hold. */
#include <string.h>

#include "sched/engine_private.h"

/* Record what happened in this cycle: it predicts the next one. */
static void event_record(struct lh_engine *engine, struct lh_residency_event event)
{
    struct lh_event_list *list = &engine->recording;
    if (list->count == engine->event_max) {
        list->overflowed = true; /* a cycle too long to remember is not predicted */
        return;
    }
    list->events[list->count++] = event;
}

/* Before anything is recorded: forward in the order of units, backward in the opposite one. */
static void prediction_default(struct lh_engine *engine, struct lh_event_list *list)
{
    list->count = 0;
    uint32_t count = engine->opts.unit_count;
    for (uint32_t i = 0; i < count; i++) {
        list->events[list->count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_BEGIN};
        list->events[list->count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_END};
    }
    for (uint32_t i = count; engine->mode == LH_ENGINE_MODE_TRAIN && i-- > 0;) {
        list->events[list->count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_BEGIN};
        list->events[list->count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_END};
        if (engine->units[i].desc.elements > 0)
            list->events[list->count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_UPDATE};
    }
}

/* Append ops for all of the prediction, or as far as one can plan now. */
static void plan_extend(struct lh_engine *engine)
{
    uint64_t count = engine->predicted.count;
    struct lh_residency_op *ops = engine->ops + engine->op_count;
    uint64_t op_max = engine->op_max - engine->op_count;
    uint64_t loaded = 0;
    uint64_t failed_at = 0;
    lh_residency_copy(&engine->plan_before, &engine->plan);
    int64_t added = lh_residency_plan(&engine->plan, engine->predicted.events, count, true, ops,
                                      op_max, &loaded, &failed_at, &engine->plan_error);
    while (added == -ENOSPC) {
        /*
         * Units in use are in the way of event failed_at: plan up to it, the rest when it comes.
         * With less future before it the plan may choose otherwise, and fail earlier.
         */
        LH_ASSERT(failed_at < count);
        count = failed_at;
        lh_residency_copy(&engine->plan, &engine->plan_before);
        added = lh_residency_plan(&engine->plan, engine->predicted.events, count, true, ops, op_max,
                                  &loaded, &failed_at, NULL);
    }
    LH_ASSERT(added >= 0); /* op_max holds a load and its evictions for every event */
    for (int64_t i = 0; i < added; i++)
        engine->op_steps[engine->op_count + (uint64_t)i] = engine->plan_step;
    engine->op_count += (uint64_t)added;
    engine->planned_until = count;
    lh_step_stats(engine, engine->plan_step)->planned_bytes[LH_ENGINE_LINK_PARAM_READ] += loaded;
}

/* Forget the ops that wait; the plan's state is again what is in memory now. */
void lh_unit_plan_reset(struct lh_engine *engine)
{
    for (uint64_t i = engine->op_first; i < engine->op_count; i++) {
        if (engine->ops[i].kind == LH_RESIDENCY_OP_LOAD)
            lh_step_stats(engine, engine->op_steps[i])->planned_bytes[LH_ENGINE_LINK_PARAM_READ] -=
                engine->units[engine->ops[i].unit].desc.bytes;
    }
    engine->op_first = 0;
    engine->op_count = 0;
    lh_range_reset(&engine->plan.range);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        bool is_here = unit->state != LH_UNIT_STATE_ABSENT;
        engine->plan.offsets[i] = is_here ? unit->offset : LH_RESIDENCY_ABSENT;
        engine->plan.use_counts[i] = unit->use_count;
        engine->plan.open_uses[i] = unit->use_is_open ? 1 : 0;
        if (is_here)
            lh_range_take(&engine->plan.range, unit->offset, unit->desc.bytes);
    }
}

/*
 * The step that closed last has moved all its bytes but its commit's: loads of its plan that still
 * wait, and uses that follow before the next begin, are of the next step if that has begun, else of
 * none.
 */
void lh_unit_plan_step_end(struct lh_engine *engine)
{
    if (engine->plan_step == engine->step)
        engine->plan_step = 0;
    for (uint64_t i = engine->op_first; i < engine->op_count; i++) {
        if (engine->op_steps[i] != engine->step)
            continue;
        if (engine->ops[i].kind == LH_RESIDENCY_OP_LOAD) {
            uint64_t bytes = engine->units[engine->ops[i].unit].desc.bytes;
            lh_step_stats(engine, engine->step)->planned_bytes[LH_ENGINE_LINK_PARAM_READ] -= bytes;
            lh_step_stats(engine, engine->plan_step)->planned_bytes[LH_ENGINE_LINK_PARAM_READ] +=
                bytes;
        }
        engine->op_steps[i] = engine->plan_step;
    }
}

/* Somebody is owed this unit, for a use that is counted already. */
static bool is_owed(const struct lh_unit *unit)
{
    if (unit->state != LH_UNIT_STATE_ABSENT)
        return false;
    return unit->waiter_count > 0 || (unit->update_is_queued && !unit->update_is_done);
}

/*
 * Plan again from what is in memory: first what is owed, then event (may be NULL), then the
 * prediction from tail_from on.
 */
static void plan_again(struct lh_engine *engine, const struct lh_residency_event *event,
                       uint64_t tail_from)
{
    struct lh_event_list *predicted = &engine->predicted;
    uint64_t owed_count = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        owed_count += is_owed(&engine->units[i]);
    uint64_t head = owed_count + (event ? 1 : 0);
    uint64_t tail = lh_min_u64(predicted->count - tail_from, engine->event_max - head);
    memmove(predicted->events + head, predicted->events + tail_from,
            tail * sizeof(*predicted->events));
    predicted->count = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        if (is_owed(&engine->units[i]))
            predicted->events[predicted->count++] =
                (struct lh_residency_event){i, LH_RESIDENCY_EVENT_NEED};
    }
    if (event)
        predicted->events[predicted->count++] = *event;
    predicted->count += tail;
    engine->predicted_position = head;
    lh_unit_plan_reset(engine);
    plan_extend(engine);
}

/* The position of the next use in the prediction. */
static uint64_t next_predicted(const struct lh_engine *engine)
{
    uint64_t at = engine->predicted_position;
    while (at < engine->predicted.count &&
           engine->predicted.events[at].kind == LH_RESIDENCY_EVENT_END)
        at++;
    return at;
}

void lh_unit_event(struct lh_engine *engine, uint32_t index, enum lh_residency_event_kind kind)
{
    struct lh_residency_event event = {index, (uint32_t)kind};
    event_record(engine, event);
    if (kind == LH_RESIDENCY_EVENT_END)
        return;
    const struct lh_event_list *predicted = &engine->predicted;
    uint64_t at = next_predicted(engine);
    bool is_expected = at < predicted->count && predicted->events[at].unit == index &&
                       predicted->events[at].kind == (uint32_t)kind;
    if (is_expected && at < engine->planned_until) {
        engine->predicted_position = at + 1;
    } else {
        /* Either the plan ended before this use, or something else happened than was predicted:
         * skip to where it was foreseen, or put it in, and plan again from here. */
        uint64_t tail_from = engine->predicted_position;
        for (uint64_t i = at; i < predicted->count; i++) {
            if (predicted->events[i].unit == index && predicted->events[i].kind == (uint32_t)kind) {
                tail_from = i + 1;
                break;
            }
        }
        if (!is_expected)
            lh_step_stats(engine, engine->plan_step)->replans++;
        plan_again(engine, &event, tail_from);
    }
    lh_engine_unit_at(engine, index)->use_count++;
}

void lh_unit_cycle_end(struct lh_engine *engine)
{
    /*
     * A training cycle that was not closed (an exception, a forward without a step) predicts
     * nothing.
     */
    bool is_whole = engine->mode == LH_ENGINE_MODE_EVAL || engine->plan_step <= engine->step;
    if (engine->recording.count > 0 && !engine->recording.overflowed && is_whole) {
        struct lh_event_list old = engine->recorded[engine->mode];
        engine->recorded[engine->mode] = engine->recording;
        engine->recording = old;
    }
    engine->recording.count = 0;
    engine->recording.overflowed = false;
}

void lh_unit_prediction_forget(struct lh_engine *engine)
{
    engine->predicted.count = 0;
    engine->predicted_position = 0;
    engine->recording.count = 0;
    lh_unit_plan_reset(engine);
    engine->planned_until = 0;
}

void lh_unit_plan_begin(struct lh_engine *engine, enum lh_engine_mode mode)
{
    bool is_whole = next_predicted(engine) == engine->predicted.count &&
                    engine->planned_until == engine->predicted.count;
    lh_unit_cycle_end(engine);
    engine->mode = mode;
    engine->plan_step = mode == LH_ENGINE_MODE_TRAIN ? engine->step + 1 : 0;
    const struct lh_event_list *known = &engine->recorded[mode];
    engine->predicted_position = 0;
    if (known->count > 0) {
        memcpy(engine->predicted.events, known->events, known->count * sizeof(*known->events));
        engine->predicted.count = known->count;
    } else {
        prediction_default(engine, &engine->predicted);
    }
    if (!is_whole) {
        plan_again(engine, NULL, 0);
        return;
    }
    /* The cycle before went as planned: this plan follows it, behind the ops that still wait. */
    uint64_t waiting = engine->op_count - engine->op_first;
    memmove(engine->ops, engine->ops + engine->op_first, waiting * sizeof(*engine->ops));
    memmove(engine->op_steps, engine->op_steps + engine->op_first,
            waiting * sizeof(*engine->op_steps));
    engine->op_first = 0;
    engine->op_count = waiting;
    plan_extend(engine);
}

/* Its bytes are about to be replaced by the next step's. */
static bool is_old(const struct lh_engine *engine, const struct lh_unit *unit)
{
    bool is_due = unit->update_is_queued || engine->step_state == LH_STEP_STATE_CLOSED;
    return unit->gradient_count > 0 && is_due && unit->chunks_computed < unit->chunk_count;
}

/*
 * A checkpoint computes a block again and reads a unit that it does not differentiate (no_grad,
 * detach), which keeps no handle; its gradients came from elsewhere, and its update has begun: the
 * values of this step are gone.
 */
static void stale_fail(struct lh_engine *engine, uint32_t index)
{
    struct lh_error err = {0};
    lh_error_set(&err, -ESTALE,
                 "unit %u is read again in backward after all its gradients came, and its update "
                 "has begun: a checkpoint reads it without differentiating it; updates that wait "
                 "for step() allow that: schedule=\"deferred\"",
                 index);
    lh_engine_fail(engine, &err);
}

void lh_unit_make_ready(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(unit->state == LH_UNIT_STATE_LOADING || unit->state == LH_UNIT_STATE_UPDATING);
    unit->state = LH_UNIT_STATE_READY;
    /* Who waits for a unit whose update is ahead waits for its new values. */
    uint32_t pins = is_old(engine, unit) ? 0 : unit->waiter_count;
    unit->waiter_count -= pins;
    atomic_store(&unit->word, LH_UNIT_READY_BIT | pins);
    if (pins > 0) {
        atomic_fetch_add(&unit->grants, pins);
        lh_engine_notify(engine);
    }
}

void lh_unit_load_done(struct lh_engine *engine, struct lh_unit *unit)
{
    lh_unit_make_ready(engine, unit);
    lh_update_consider(engine, (uint32_t)(unit - engine->units));
}

/* The training thread pinned a READY unit (USE) or waits for a pin (ACQUIRE): a use begins. */
static void use_begin(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    if (!unit->use_is_open) {
        lh_defer_use(engine, index);
        lh_unit_event(engine, index, LH_RESIDENCY_EVENT_BEGIN);
        unit->use_is_open = true;
        unit->use_started_ns = lh_engine_now(engine);
    }
}

void lh_unit_use(struct lh_engine *engine, uint32_t index)
{
    use_begin(engine, index);
}

void lh_unit_acquire(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    if (engine->step_state == LH_STEP_STATE_OPEN && unit->update_is_queued) {
        stale_fail(engine, index);
        return;
    }
    use_begin(engine, index);
    if (unit->state == LH_UNIT_STATE_READY && !is_old(engine, unit)) {
        atomic_fetch_add(&unit->word, 1);
        atomic_fetch_add(&unit->grants, 1);
        lh_engine_notify(engine);
        return;
    }
    unit->waiter_count++;
    if (unit->state == LH_UNIT_STATE_LOADING)
        lh_transfer_raise(engine, &unit->load);
}

void lh_unit_release(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    if (unit->use_is_open && lh_unit_pins(unit) == 0 && unit->waiter_count == 0) {
        lh_unit_event(engine, index, LH_RESIDENCY_EVENT_END);
        unit->use_is_open = false;
        lh_engine_trace_add(engine, (struct lh_engine_trace_event){
                                        .kind = LH_ENGINE_TRACE_USE,
                                        .unit = index,
                                        .start_ns = unit->use_started_ns,
                                        .end_ns = lh_engine_now(engine),
                                    });
    }
    lh_update_consider(engine, index);
}

/* Take the unit from training threads: true if nobody has it pinned. */
bool lh_unit_claim(struct lh_unit *unit)
{
    uint32_t expected = LH_UNIT_READY_BIT;
    return atomic_compare_exchange_strong(&unit->word, &expected, 0);
}

void lh_unit_forget(struct lh_engine *engine, uint32_t index)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    LH_ASSERT(unit->state == LH_UNIT_STATE_READY);
    bool is_mine = lh_unit_claim(unit);
    LH_ASSERT(is_mine);
    unit->state = LH_UNIT_STATE_ABSENT;
}

static bool evict_is_possible(const struct lh_engine *engine, const struct lh_residency_op *op)
{
    const struct lh_unit *unit = &engine->units[op->unit];
    return unit->state == LH_UNIT_STATE_READY && unit->use_count >= op->uses_before &&
           unit->waiter_count == 0 && (!unit->update_is_queued || unit->update_is_done);
}

static void load_start(struct lh_engine *engine, const struct lh_residency_op *op, uint64_t step)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, op->unit);
    LH_ASSERT(unit->state == LH_UNIT_STATE_ABSENT);
    unit->state = LH_UNIT_STATE_LOADING;
    unit->offset = op->offset;
    uint32_t slot = lh_store_read_slot(engine->store, unit->desc.store_group);
    unit->load = (struct lh_transfer){
        .kind = LH_IO_KIND_READ,
        .priority = unit->waiter_count > 0 ? LH_PRIORITY_DEMAND : LH_PRIORITY_PREFETCH,
        .link = LH_ENGINE_LINK_PARAM_READ,
        .unit = op->unit,
        .slab = LH_CHUNK_NONE,
        .step = step,
        .extent = unit->desc.param_extent,
        .slot = slot,
        .bytes = unit->desc.bytes,
        .buffer = engine->region + op->offset,
    };
    lh_transfer_submit(engine, &unit->load);
}

/*
 * Nothing moves and somebody waits: an eviction of the plan waits for a use that has not ended
 * where it did in the step before (a view that lives longer). Plan again around what is in use.
 */
void lh_unit_plan_around(struct lh_engine *engine)
{
    lh_step_stats(engine, engine->plan_step)->replans++;
    plan_again(engine, NULL, engine->predicted_position);
}

/* Execute the plan's ops in order, as far as they can go now. */
bool lh_unit_pump(struct lh_engine *engine)
{
    bool moved = false;
    if (engine->planned_until < engine->predicted_position) {
        /* A use has begun that no plan could serve yet. */
        plan_again(engine, NULL, engine->predicted_position);
        moved = engine->planned_until >= engine->predicted_position;
    }
    while (engine->op_first < engine->op_count) {
        const struct lh_residency_op *op = &engine->ops[engine->op_first];
        if (op->kind == LH_RESIDENCY_OP_LOAD) {
            load_start(engine, op, engine->op_steps[engine->op_first]);
        } else {
            struct lh_unit *unit = lh_engine_unit_at(engine, op->unit);
            if (!evict_is_possible(engine, op) || !lh_unit_claim(unit))
                break;
            unit->state = LH_UNIT_STATE_ABSENT;
        }
        engine->op_first++;
        moved = true;
    }
    return moved;
}
