/*
 * Which chunk moves next: slabs given out, chunks fetched and computed, in the order of the queue.
 *
 * A poll looks at what can move. A unit's cursor passes what is computed; behind it, chunks that
 * are LOADED are counted, and once no slab is to be had nothing else is looked at. So a poll costs
 * what is in slabs, not what the model has.
 */
#include "sched/engine_private.h"

#define JOBS_PER_WORKER 2

/* What one poll has found out so far. */
struct pump {
    bool moved;
    bool may_fetch; /* nobody with a better right waits for a slab */
    bool is_full;   /* no slab is free, and none holds what was only read ahead */
    bool is_urgent; /* somebody waits for a unit that waits for workers: no later one computes */
};

void lh_chunk_state_set(struct lh_engine *engine, struct lh_chunk *chunk, enum lh_chunk_state state)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, chunk->unit);
    bool is_computed = chunk->computed_step == lh_step_current(engine);
    if (chunk->state == LH_CHUNK_STATE_LOADED && !is_computed) {
        LH_ASSERT(unit->chunks_loaded > 0);
        unit->chunks_loaded--;
        unit->chunks_to_pass -= !chunk->is_kept;
    }
    chunk->state = state;
    if (state == LH_CHUNK_STATE_LOADED && !is_computed) {
        unit->chunks_loaded++;
        unit->chunks_to_pass += !chunk->is_kept;
    }
}

void lh_chunks_recount(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        engine->units[i].chunks_loaded = 0;
        engine->units[i].chunks_to_pass = 0;
        engine->units[i].chunk_next = 0;
    }
    for (uint32_t i = 0; i < engine->budget.slab_count; i++) {
        if (engine->slabs[i].chunk == LH_CHUNK_NONE || engine->slabs[i].is_spill)
            continue;
        const struct lh_chunk *chunk = &engine->chunks[engine->slabs[i].chunk];
        if (chunk->state != LH_CHUNK_STATE_LOADED || chunk->computed_step > engine->step)
            continue;
        engine->units[chunk->unit].chunks_loaded++;
        engine->units[chunk->unit].chunks_to_pass += !chunk->is_kept;
    }
    engine->ahead_first = 0;
}

void lh_slab_clear(struct lh_engine *engine, struct lh_slab *slab)
{
    struct lh_chunk *chunk = &engine->chunks[slab->chunk];
    lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_IDLE);
    chunk->slab = LH_CHUNK_NONE;
    slab->chunk = LH_CHUNK_NONE;
    slab->has_gradients = false;
}

/*
 * A slab for a chunk of unit: a free one, else, where unit's update is queued, one whose chunk was
 * read ahead of its gradients. Where unit is UPDATING and every slab holds a chunk of a unit that
 * is not (its parameters may have to wait for room that unit takes), one of those, as none would
 * ever become free. The same for gradients (unit NULL). LH_CHUNK_NONE: there is none now.
 */
static uint32_t slab_find(struct lh_engine *engine, const struct lh_unit *unit)
{
    uint32_t ahead = LH_CHUNK_NONE;
    uint32_t blocked = LH_CHUNK_NONE;
    bool is_moving = false;
    for (uint32_t i = engine->budget.kept_chunk_count; i < engine->budget.slab_count; i++) {
        const struct lh_slab *slab = &engine->slabs[i];
        if (slab->chunk == LH_CHUNK_NONE)
            return i;
        if (slab->is_spill) {
            is_moving = true;
            continue;
        }
        const struct lh_chunk *chunk = &engine->chunks[slab->chunk];
        const struct lh_unit *owner = &engine->units[chunk->unit];
        if (chunk->state != LH_CHUNK_STATE_LOADED || owner->state == LH_UNIT_STATE_UPDATING)
            is_moving = true;
        else if (owner->update_is_queued)
            blocked = i;
        else
            ahead = i;
    }
    if (unit && !unit->update_is_queued)
        return LH_CHUNK_NONE;
    uint32_t stolen = ahead;
    if (stolen == LH_CHUNK_NONE && !is_moving && (!unit || unit->state == LH_UNIT_STATE_UPDATING))
        stolen = blocked;
    if (stolen == LH_CHUNK_NONE)
        return LH_CHUNK_NONE;
    lh_slab_clear(engine, &engine->slabs[stolen]);
    engine->ahead_first = 0; /* it may be read ahead again */
    return stolen;
}

uint32_t lh_slab_take(struct lh_engine *engine)
{
    return slab_find(engine, NULL);
}

static bool chunk_fetch(struct lh_engine *engine, struct lh_chunk *chunk, struct pump *pump)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    uint32_t slab = LH_CHUNK_NONE;
    LH_ASSERT(chunk->state == LH_CHUNK_STATE_IDLE);
    if (chunk->is_kept)
        slab = chunk->kept_slab;
    else if (!pump->is_full || unit->state == LH_UNIT_STATE_UPDATING)
        slab = slab_find(engine, unit);
    if (slab == LH_CHUNK_NONE) {
        pump->is_full |= unit->update_is_queued;
        return false;
    }
    lh_chunk_read(engine, chunk, slab);
    pump->moved = true;
    return true;
}

static struct lh_chunk *chunk_of(struct lh_engine *engine, const struct lh_unit *unit,
                                 uint32_t index)
{
    return &engine->chunks[unit->chunk_first + index];
}

/* The first chunk that this step has not computed: it and those behind it are left. */
static uint32_t chunk_next(struct lh_engine *engine, struct lh_unit *unit)
{
    while (unit->chunk_next < unit->chunk_count &&
           chunk_of(engine, unit, unit->chunk_next)->computed_step == lh_step_current(engine))
        unit->chunk_next++;
    return unit->chunk_next;
}

/*
 * Every worker has a job and the next one: chunks that keep their slabs wait, so that those that
 * pass through never wait behind all of them, with the SSDs idle meanwhile.
 */
static bool workers_are_full(const struct lh_engine *engine)
{
    return engine->jobs_in_flight >= JOBS_PER_WORKER * engine->exec->thread_count;
}

/* Compute what the unit's chunks allow, and fetch them as far as slabs go. */
static void unit_pump(struct lh_engine *engine, struct lh_unit *unit, struct pump *pump)
{
    const bool is_late = pump->is_urgent;
    bool may_fetch = pump->may_fetch;
    uint32_t pass_count = unit->chunks_to_pass;
    uint32_t keep_count = unit->chunks_loaded - pass_count;

    for (uint32_t i = chunk_next(engine, unit); i < unit->chunk_count; i++) {
        bool may_keep = !workers_are_full(engine) && keep_count > 0;
        if (!may_fetch && !may_keep && pass_count == 0)
            break;
        struct lh_chunk *chunk = chunk_of(engine, unit, i);
        if (chunk->computed_step == lh_step_current(engine))
            continue;
        if (chunk->state == LH_CHUNK_STATE_IDLE)
            may_fetch = may_fetch && chunk_fetch(engine, chunk, pump);
        else if (chunk->state == LH_CHUNK_STATE_LOADED && chunk->is_kept)
            keep_count--;
        else if (chunk->state == LH_CHUNK_STATE_LOADED)
            pass_count--;
        if (chunk->state == LH_CHUNK_STATE_LOADED && unit->spill_state == LH_SPILL_STATE_DONE &&
            !engine->slabs[chunk->slab].has_gradients) {
            lh_spill_read(engine, chunk);
            pump->moved = true;
        }
        if (chunk->state == LH_CHUNK_STATE_LOADED && unit->state == LH_UNIT_STATE_UPDATING &&
            chunk->landing_count == 0 && !is_late && (!chunk->is_kept || may_keep)) {
            lh_chunk_compute(engine, chunk);
            pump->moved = true;
        }
    }
    pump->is_urgent |= unit->waiter_count > 0 && workers_are_full(engine) &&
                       unit->chunks_loaded > unit->chunks_to_pass;
    /* Who waits for a slab has the first right to one; later units compute and free theirs. */
    if (!may_fetch && unit->state == LH_UNIT_STATE_UPDATING)
        pump->may_fetch = false;
}

/* Read ahead, in the order of the last step's updates, into slabs that are free. */
static void ahead_pump(struct lh_engine *engine, struct pump *pump)
{
    for (; engine->ahead_first < engine->predicted_update_count; engine->ahead_first++) {
        uint32_t index = engine->predicted_updates[engine->ahead_first];
        struct lh_unit *unit = lh_engine_unit_at(engine, index);
        for (uint32_t i = 0; i < unit->chunk_count && !unit->update_is_queued; i++) {
            struct lh_chunk *chunk = chunk_of(engine, unit, i);
            if (chunk->state == LH_CHUNK_STATE_IDLE && !chunk_fetch(engine, chunk, pump))
                return;
        }
    }
}

/*
 * Its gradients are on their way (to SSD, or from an accelerator), or a worker sums them up. Where
 * nobody reads them but the update, it may begin with the first chunk that has them: it is chunk by
 * chunk that the last unit of backward, for which the next forward waits, gets through.
 */
static bool is_early(const struct lh_engine *engine, const struct lh_unit *unit)
{
    bool is_whole = engine->opts.schedule == LH_ENGINE_SCHEDULE_NAIVE || engine->takes_norms ||
                    unit->spills || unit->spill_state != LH_SPILL_STATE_NONE;
    return unit->spill_state == LH_SPILL_STATE_RUNNING ||
           unit->norm_state == LH_NORM_STATE_RUNNING ||
           (is_whole ? !lh_landing_is_over(unit) : !lh_landing_is_certain(engine, unit));
}

static bool unit_take(struct lh_engine *engine, struct lh_unit *unit)
{
    bool is_here = unit->state == LH_UNIT_STATE_READY && !unit->is_flushing;
    if (is_early(engine, unit) || !is_here || unit->chunks_computed > 0 ||
        !lh_unit_claim_host(engine, unit))
        return false;
    unit->state = LH_UNIT_STATE_UPDATING;
    return true;
}

/*
 * The unit whose update is on its way, else the first one that can begin; never one that waits for
 * another's room, as nothing else moves meanwhile. NULL: none can.
 */
static struct lh_unit *naive_unit(struct lh_engine *engine, struct pump *pump)
{
    for (uint32_t i = engine->update_first; i < engine->update_count; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, engine->update_queue[i]);
        if (unit->state == LH_UNIT_STATE_UPDATING)
            return unit;
    }
    for (uint32_t i = engine->update_first; i < engine->update_count; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, engine->update_queue[i]);
        if (unit_take(engine, unit)) {
            pump->moved = true;
            return unit;
        }
    }
    return NULL;
}

/*
 * All of a unit is read, then all computed, then all written (lh_update_job_done); nothing of the
 * next one before. Where it has more chunks than there are slabs it goes by groups of those.
 * Source: LoHan IV-C fig. 3a.
 */
static void naive_pump(struct lh_engine *engine, struct pump *pump)
{
    struct lh_unit *unit = engine->chunks_busy == 0 ? naive_unit(engine, pump) : NULL;
    bool is_reading = false;

    if (!unit)
        return;
    for (uint32_t i = chunk_next(engine, unit); i < unit->chunk_count; i++) {
        struct lh_chunk *chunk = chunk_of(engine, unit, i);
        if (chunk->state == LH_CHUNK_STATE_IDLE && !chunk_fetch(engine, chunk, pump))
            break;
        is_reading |= chunk->state == LH_CHUNK_STATE_READING;
    }
    for (uint32_t i = chunk_next(engine, unit); i < unit->chunk_count && !is_reading; i++) {
        struct lh_chunk *chunk = chunk_of(engine, unit, i);
        if (chunk->state != LH_CHUNK_STATE_LOADED)
            break;
        lh_chunk_compute(engine, chunk);
        pump->moved = true;
    }
}

bool lh_update_pump(struct lh_engine *engine)
{
    const bool is_naive = engine->opts.schedule == LH_ENGINE_SCHEDULE_NAIVE;
    struct pump pump = {.may_fetch = true};

    if (engine->step_state != LH_STEP_STATE_OPEN && engine->step_state != LH_STEP_STATE_CLOSED)
        return false;
    pump.moved = lh_spill_pump(engine);
    for (uint32_t i = engine->update_first; i < engine->update_count && !is_naive; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, engine->update_queue[i]);
        if (is_early(engine, unit))
            continue;
        pump.moved |= unit_take(engine, unit);
        unit_pump(engine, unit, &pump);
    }
    if (is_naive)
        naive_pump(engine, &pump);
    while (engine->update_first < engine->update_count) {
        uint32_t first = engine->update_queue[engine->update_first];
        if (engine->units[first].chunks_computed < engine->units[first].chunk_count)
            break;
        engine->update_first++;
    }
    /* Where gradients go to SSD, slabs are for them until the close. */
    if (engine->step_state == LH_STEP_STATE_OPEN && !engine->any_spills && !is_naive)
        ahead_pump(engine, &pump);
    return pump.moved;
}
