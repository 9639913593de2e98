/*
 * Gradients in transit from an accelerator to main memory, where they wait for their update.
 *
 * In main memory, gradients lie in blocks, one block per chunk of the unit, with each element at
 * its place in the chunk. All blocks have the same size, so any free block fits any chunk:
 *
 *      posted (device tensor) -> copies, one a chunk that it touches -> landed: the tensor is free
 *
 * Only the unit's own norm, spill to SSD or update waits for the copies; the update starts with the
 * chunks that have landed as soon as all other chunks are certain to land. Without a free block a
 * gradient waits on the device.
 *
 * [Note: Reserved blocks] A unit with only some of its gradients keeps its blocks until the others
 * arrive; a unit with live handles keeps them until the handles are dropped; a unit that waits in
 * memory keeps them until the close. So as many blocks as the largest unit has chunks are reserved
 * for one unit at a time that needs nothing more from the training thread: its update is queued and
 * its parameters are in memory (where they stay), or its spill to SSD has begun. Such a unit will
 * return its blocks, and the next such unit gets them. Other units use the remaining blocks. A unit
 * whose update has begun has all the blocks that it needs, and its gradients are copied first,
 * because other units may wait for its slabs.
 *
 * Source: LoHan IV-C, Fuyou 4.3 (gradients are offloaded as backward makes them).
 */
#include <string.h>

#include "sched/engine_private.h"

uint64_t lh_landing_waiting_bytes(const struct lh_engine *engine, const struct lh_unit *unit)
{
    return lh_engine_gradients_land(engine) ? unit->chunk_count * engine->landing->block_bytes
                                            : unit->desc->bytes;
}

/* Whether the unit's update waits for the close. */
static bool is_waiting(const struct lh_engine *engine, const struct lh_unit *unit)
{
    return unit->parts->defer.is_deferred || lh_repeat_waits(engine);
}

/*
 * Count the gradients of a unit that will wait in memory for the close as held until they have
 * landed, so that backward does not run ahead of the link.
 */
static void waiting_hold(struct lh_engine *engine, struct lh_unit *unit)
{
    if (!is_waiting(engine, unit) || unit->parts->spill.is_chosen ||
        unit->update.gradient_count < unit->desc->param_count)
        return;
    LH_ASSERT(unit->parts->landing.held_bytes == 0);
    unit->parts->landing.held_bytes = unit->update.gradient_bytes;
    lh_gradient_hold(engine, unit->parts->landing.held_bytes);
}

static uint32_t chunk_at(const struct lh_engine *engine, const struct lh_unit *unit,
                         uint64_t element)
{
    LH_ASSERT(element < unit->desc->elements);
    return unit->chunk_first + (uint32_t)(element / engine->budget.chunk_elements);
}

static void gradient_taken(struct lh_engine *engine, uint32_t param)
{
    const struct lh_engine_param *desc = &engine->params[param];
    struct lh_unit *unit = lh_engine_unit_at(engine, desc->unit);
    struct lh_gradient *gradient = &engine->gradients[param];
    uint64_t bytes = desc->count * lh_dtype_bytes(gradient->dtype);
    uint32_t last = chunk_at(engine, unit, desc->first + desc->count - 1);
    for (uint32_t i = chunk_at(engine, unit, desc->first); i <= last; i++)
        engine->chunks[i].landing.count++;
    gradient->issued = 0;
    gradient->copies = 0;
    unit->parts->landing.count++;
    unit->parts->landing.posted_count++;
    unit->parts->landing.moved_bytes += bytes;
    LH_ASSERT(engine->landing->end - engine->landing->first < engine->param_count);
    engine->landing->params[engine->landing->end++ % engine->param_count] = param;
    waiting_hold(engine, unit);
}

static void landed(struct lh_engine *engine, uint32_t param)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, engine->params[param].unit);
    LH_ASSERT(unit->parts->landing.count > 0 &&
              unit->parts->landing.posted_count < unit->parts->landing.count);
    unit->parts->landing.count--;
    lh_gradient_release(engine, param);
    if (unit->parts->landing.count == 0) {
        lh_gradient_unhold(engine, unit->parts->landing.held_bytes);
        unit->parts->landing.held_bytes = 0;
        if (engine->norm) /* the norm may be requested */
            lh_norm_consider(engine, unit);
    }
    lh_core_notify(engine);
}

static void copied(struct lh_engine *engine, struct lh_copy *copy)
{
    LH_ASSERT(copy->param < engine->param_count && copy->chunk < engine->chunk_count);
    struct lh_gradient *gradient = &engine->gradients[copy->param];
    LH_ASSERT(gradient->copies > 0 && engine->chunks[copy->chunk].landing.count > 0);
    engine->chunks[copy->chunk].landing.count--;
    if (--gradient->copies == 0 && gradient->issued == engine->params[copy->param].count)
        landed(engine, copy->param);
}

static bool block_take(struct lh_engine *engine, struct lh_chunk *chunk)
{
    uint32_t kept = chunk->unit == engine->landing->unit ? 0 : engine->landing->reserve;
    LH_ASSERT(chunk->unit < engine->opts.unit_count);
    if (chunk->landing.block)
        return true;
    if (engine->landing->blocks.free_count <= kept)
        return false;
    chunk->landing.block = lh_pool_acquire(&engine->landing->blocks);
    return true;
}

/*
 * Copy the next piece of param's gradient, up to the end of a chunk. Returns false if that is not
 * possible now.
 */
static bool piece_copy(struct lh_engine *engine, uint32_t param)
{
    const struct lh_engine_param *desc = &engine->params[param];
    struct lh_gradient *gradient = &engine->gradients[param];
    struct lh_unit *unit = lh_engine_unit_at(engine, desc->unit);
    LH_ASSERT(gradient->pointer && gradient->issued < desc->count);
    uint64_t element = desc->first + gradient->issued;
    struct lh_chunk *chunk = &engine->chunks[chunk_at(engine, unit, element)];
    uint64_t count = lh_min_u64(desc->first + desc->count, chunk->first + chunk->count) - element;
    uint64_t element_bytes = lh_dtype_bytes(gradient->dtype);
    if (!lh_copy_is_free(engine, LH_COPY_USER_GRADIENT) || !block_take(engine, chunk))
        return false;
    struct lh_copy *copy = lh_copy_take(engine, LH_COPY_USER_GRADIENT);
    copy->done = copied;
    copy->what = "a gradient's copy";
    copy->unit = desc->unit;
    copy->param = param;
    copy->chunk = (uint32_t)(chunk - engine->chunks);
    copy->dev = (struct lh_dev_copy){
        .direction = LH_DEV_DIRECTION_OUT,
        .host = chunk->landing.block + (element - chunk->first) * element_bytes,
        .device = (uint8_t *)(uintptr_t)gradient->pointer + gradient->issued * element_bytes,
        .bytes = count * element_bytes,
        /* The direction is a queue: later pieces follow the first one. */
        .after = gradient->issued == 0 ? gradient->is_computed : NULL,
    };
    lh_core_stats(engine, lh_core_step(engine))->bytes[LH_ENGINE_LINK_COPY_OUT] +=
        count * element_bytes;
    if (!lh_copy_submit(engine, copy))
        return false;
    gradient->issued += count;
    gradient->copies++;
    if (gradient->issued < desc->count)
        return true;
    LH_ASSERT(unit->parts->landing.posted_count > 0);
    unit->parts->landing.posted_count--;
    return true;
}

static bool is_posted(const struct lh_engine *engine, uint32_t param)
{
    return engine->gradients[param].pointer &&
           engine->gradients[param].issued < engine->params[param].count;
}

/* Whether a unit returns its blocks once its gradients are on SSD; otherwise with its update. */
static bool returns_blocks(const struct lh_engine *engine, const struct lh_unit *unit)
{
    return is_waiting(engine, unit) || unit->update.gradient_count < unit->desc->param_count;
}

/* The next unit that may take blocks from the reserve; LH_UNIT_NONE: there is none now. */
static uint32_t unit_next(const struct lh_engine *engine)
{
    const struct lh_spill *spill = engine->spill;
    for (uint32_t i = spill ? spill->first : 0; spill && i < spill->count; i++) {
        const struct lh_unit *unit = &engine->units[spill->queue[i]];
        if (unit->parts->landing.posted_count > 0 && returns_blocks(engine, unit))
            return spill->queue[i];
    }
    for (uint32_t i = engine->updates.first; i < engine->updates.count; i++) {
        const struct lh_unit *unit = &engine->units[engine->updates.queue[i]];
        if (unit->parts->landing.posted_count > 0 && unit->state != LH_UNIT_STATE_ABSENT)
            return engine->updates.queue[i];
    }
    return LH_UNIT_NONE;
}

/* Take all blocks needed by the unit that may use the reserve, or as many as are free. */
static void blocks_take(struct lh_engine *engine)
{
    if (engine->landing->unit == LH_UNIT_NONE)
        return;
    const struct lh_unit *unit = &engine->units[engine->landing->unit];
    for (uint32_t i = 0; i < unit->chunk_count; i++) {
        struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + i];
        if (chunk->landing.count > 0 && !block_take(engine, chunk))
            break;
    }
}

/*
 * A unit whose update has begun and whose gradients are not all issued, or LH_UNIT_NONE. All of the
 * unit's chunks have blocks, and other units may wait for its slabs, so the rest of its gradients
 * must not wait for another unit.
 */
static uint32_t unit_begun(const struct lh_engine *engine)
{
    for (uint32_t i = engine->updates.first; i < engine->updates.count; i++) {
        const struct lh_unit *unit = &engine->units[engine->updates.queue[i]];
        if (unit->parts->landing.posted_count > 0 && unit->state == LH_UNIT_STATE_UPDATING)
            return engine->updates.queue[i];
    }
    return LH_UNIT_NONE;
}

/* The parameter whose gradient is copied next, or LH_PARAM_NONE. See [Note: Reserved blocks]. */
static uint32_t param_next(struct lh_engine *engine)
{
    uint32_t next = unit_begun(engine);
    if (next == LH_UNIT_NONE) {
        if (engine->landing->unit == LH_UNIT_NONE ||
            engine->units[engine->landing->unit].parts->landing.posted_count == 0) {
            engine->landing->unit = unit_next(engine);
            blocks_take(engine);
        }
        next = engine->landing->unit;
    }
    if (next != LH_UNIT_NONE) {
        uint32_t param = engine->units[next].desc->param_first;
        while (!is_posted(engine, param))
            param++;
        LH_ASSERT(param < engine->param_count && engine->params[param].unit == next);
        return param;
    }
    for (uint64_t i = engine->landing->first; i < engine->landing->end; i++) {
        uint32_t param = engine->landing->params[i % engine->param_count];
        const struct lh_unit *unit = &engine->units[engine->params[param].unit];
        /* Gradients that will wait on SSD get no place in memory before their spill begins. */
        bool has_place = !is_waiting(engine, unit) || !unit->parts->spill.is_chosen;
        if (is_posted(engine, param) && has_place)
            return param;
        if (!is_posted(engine, param) && i == engine->landing->first)
            engine->landing->first++;
    }
    return LH_PARAM_NONE;
}

static bool pump_before(struct lh_engine *engine)
{
    bool moved = false;
    while (engine->landing->first < engine->landing->end && !atomic_load(&engine->failed)) {
        uint32_t param = param_next(engine);
        if (param == LH_PARAM_NONE || !piece_copy(engine, param))
            break;
        moved = true;
    }
    return moved;
}

static void chunk_consumed(struct lh_engine *engine, struct lh_chunk *chunk)
{
    if (!chunk->landing.block)
        return;
    lh_pool_release(&engine->landing->blocks, chunk->landing.block);
    chunk->landing.block = NULL;
}

static void step_forgotten(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->chunk_count; i++) {
        chunk_consumed(engine, &engine->chunks[i]);
        engine->chunks[i].landing.count = 0;
    }
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        engine->units[i].parts->landing.count = 0;
        engine->units[i].parts->landing.posted_count = 0;
        engine->units[i].parts->landing.held_bytes = 0;
        engine->units[i].parts->landing.moved_bytes = 0;
    }
    engine->landing->unit = LH_UNIT_NONE;
    engine->landing->first = 0;
    engine->landing->end = 0;
}

/* Whether all of the unit's gradients are certain to land: their chunks have blocks. */
static bool is_certain(const struct lh_engine *engine, const struct lh_unit *unit)
{
    if (unit->parts->landing.count == 0)
        return true;
    for (uint32_t i = unit->chunk_first; i < unit->chunk_first + unit->chunk_count; i++) {
        if (engine->chunks[i].landing.count > 0 && !engine->chunks[i].landing.block)
            return false;
    }
    return true;
}

/*
 * If only the update reads the gradients, the update may begin with the first chunk that has them:
 * the last unit of backward, for which the next forward waits, is then processed chunk by chunk.
 */
static bool update_may_start(const struct lh_engine *engine, const struct lh_unit *unit)
{
    bool is_whole = (engine->norm && engine->norm->is_taken) || unit->parts->spill.is_chosen ||
                    unit->parts->spill.state != LH_SPILL_STATE_NONE;
    return unit->parts->landing.count == 0 || (!is_whole && is_certain(engine, unit));
}

static bool chunk_may_compute(const struct lh_engine *engine, const struct lh_chunk *chunk)
{
    (void)engine;
    return chunk->landing.count == 0;
}

/* Plan the copies of all gradients of a unit, in the parameters' dtype. */
static void planned(struct lh_engine *engine, struct lh_unit *unit, uint64_t step)
{
    uint64_t elements = 0;
    for (uint32_t i = 0; i < unit->desc->param_count; i++)
        elements += engine->params[unit->desc->param_first + i].count;
    unit->parts->landing.planned_bytes = elements * lh_dtype_bytes(unit->desc->dtype);
    lh_core_stats(engine, step)->planned_bytes[LH_ENGINE_LINK_COPY_OUT] +=
        unit->parts->landing.planned_bytes;
}

/* Correct the plan if some parameters had no gradient, or if no update of the unit was planned. */
static void plan_corrected(struct lh_engine *engine, struct lh_unit *unit)
{
    struct lh_engine_step_stats *stats = lh_core_stats(engine, engine->step);
    uint64_t planned =
        unit->update.planned_step == engine->step ? unit->parts->landing.planned_bytes : 0;
    stats->planned_bytes[LH_ENGINE_LINK_COPY_OUT] += unit->parts->landing.moved_bytes - planned;
}

/* The address of a gradient's element in its chunk's block. */
static const uint8_t *gradient_at(const struct lh_engine *engine, uint32_t param, uint64_t element)
{
    const struct lh_unit *unit = &engine->units[engine->params[param].unit];
    const struct lh_chunk *chunk = &engine->chunks[chunk_at(engine, unit, element)];
    LH_ASSERT(chunk->landing.block);
    return chunk->landing.block +
           (element - chunk->first) * lh_dtype_bytes(engine->gradients[param].dtype);
}

int lh_landing_create(struct lh_engine *engine, struct lh_error *err)
{
    uint64_t element_bytes = 0;
    LH_TRY(LH_ENGINE_PART_CREATE(engine, landing, err));
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        if (engine->units[i].desc->elements > 0)
            element_bytes = lh_max_u64(element_bytes, lh_dtype_bytes(engine->units[i].desc->dtype));
        if (engine->units[i].chunk_count > engine->landing->reserve)
            engine->landing->reserve = engine->units[i].chunk_count;
    }
    if (lh_engine_gradients_land(engine))
        engine->gradient_at = gradient_at;
    engine->landing->unit = LH_UNIT_NONE;
    engine->landing->block_bytes = engine->budget.chunk_elements * element_bytes;
    bool has_blocks = element_bytes > 0 && lh_engine_gradients_land(engine);
    uint64_t count = has_blocks ? engine->budget.gradient_bytes / engine->landing->block_bytes : 0;
    uint8_t *memory = engine->slab_memory + engine->budget.slab_count * engine->budget.slab_bytes;
    engine->landing->params =
        lh_alloc_zeroed(engine->alloc, lh_max_u64(engine->param_count, 1), sizeof(uint32_t));
    if (!engine->landing->params)
        return lh_error_set(err, -ENOMEM, "no memory for the gradients' tables");
    if (count == 0)
        return 0;
    return lh_pool_init(&engine->landing->blocks, engine->alloc, memory,
                        engine->landing->block_bytes, (uint32_t)count, err);
}

void lh_landing_destroy(struct lh_engine *engine)
{
    if (!engine->landing)
        return;
    for (uint32_t i = 0; engine->chunks && i < engine->chunk_count; i++)
        chunk_consumed(engine, &engine->chunks[i]);
    lh_pool_deinit(&engine->landing->blocks, engine->alloc);
    lh_free(engine->alloc, engine->landing->params);
}

const struct lh_feature lh_landing_feature = {
    .name = "landing",
    .gradient_taken = gradient_taken,
    .update_may_start = update_may_start,
    .chunk_may_compute = chunk_may_compute,
    .chunk_consumed = chunk_consumed,
    .planned = planned,
    .plan_corrected = plan_corrected,
    .step_forgotten = step_forgotten,
    .pump_before = pump_before,
};
