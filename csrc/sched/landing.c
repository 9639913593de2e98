/*
 * Gradients on their way from an accelerator to main memory, where they wait for their update.
 *
 * There they lie in blocks, one a chunk of the unit, element by element at the chunk's places. All
 * blocks have one size, so a free one fits any chunk:
 *
 *      posted (device tensor) -> copies, one a chunk that it touches -> landed: the tensor is free
 *
 * Nobody waits for the copies but the unit's own norm, way to SSD, or update, and that begins with
 * the chunks that are here once all others are sure to come. Without a free block a gradient waits
 * where it is.
 *
 * [Note: Blocks that come back] A unit that has only some of its gradients keeps its blocks until
 * the others come, one whose handles are alive until they are gone, one that waits in memory until
 * the close. So as many blocks as the largest unit has chunks are a reserve for one unit at a time
 * that takes nothing more from the training thread: its update is queued and its parameters are in
 * memory (they stay there), or its way to SSD has begun. It gives its blocks back, and then the
 * next one gets them. Others take what is left.
 *
 * Source: LoHan IV-C, Fuyou 4.3 (gradients are offloaded as backward makes them).
 */
#include <string.h>

#include "sched/engine_private.h"

bool lh_landing_is_used(const struct lh_engine *engine)
{
    return engine->dev && !engine->opts.gradients_in_memory;
}

bool lh_landing_is_over(const struct lh_unit *unit)
{
    return unit->landing_count == 0;
}

bool lh_landing_is_certain(const struct lh_engine *engine, const struct lh_unit *unit)
{
    if (lh_landing_is_over(unit))
        return true;
    for (uint32_t i = unit->chunk_first; i < unit->chunk_first + unit->chunk_count; i++) {
        if (engine->chunks[i].landing_count > 0 && engine->chunks[i].block == LH_BLOCK_NONE)
            return false;
    }
    return true;
}

const uint8_t *lh_landing_bytes(const struct lh_engine *engine, uint32_t param, uint64_t element)
{
    const struct lh_engine_param *desc = &engine->params[param];
    const struct lh_gradient *gradient = &engine->gradients[param];
    uint64_t element_bytes = lh_dtype_bytes(gradient->dtype);
    if (!lh_landing_is_used(engine))
        return (const uint8_t *)gradient->pointer + (element - desc->first) * element_bytes;
    const struct lh_unit *unit = &engine->units[desc->unit];
    const struct lh_chunk *chunk =
        &engine->chunks[unit->chunk_first + (uint32_t)(element / engine->budget.chunk_elements)];
    LH_ASSERT(chunk->block != LH_BLOCK_NONE);
    return engine->blocks_memory + (uint64_t)chunk->block * engine->block_bytes +
           (element - chunk->first) * element_bytes;
}

uint64_t lh_landing_waiting_bytes(const struct lh_engine *engine, const struct lh_unit *unit)
{
    return lh_landing_is_used(engine) ? unit->chunk_count * engine->block_bytes : unit->desc.bytes;
}

/*
 * A unit that waits in memory for the close is on its way until it is there: counted, so that
 * backward does not run ahead of the link.
 */
static void waiting_hold(struct lh_engine *engine, struct lh_unit *unit)
{
    if (!unit->is_deferred || unit->spills || unit->gradient_count < unit->desc.param_count)
        return;
    unit->landing_bytes = unit->gradient_bytes;
    uint64_t held =
        atomic_fetch_add(&engine->update_gradient_bytes, unit->landing_bytes) + unit->landing_bytes;
    struct lh_engine_step_stats *stats = lh_step_stats(engine, lh_step_current(engine));
    stats->gradient_bytes_max = lh_max_u64(stats->gradient_bytes_max, held);
}

static uint32_t chunk_at(const struct lh_engine *engine, const struct lh_unit *unit,
                         uint64_t element)
{
    return unit->chunk_first + (uint32_t)(element / engine->budget.chunk_elements);
}

void lh_landing_posted(struct lh_engine *engine, uint32_t param)
{
    const struct lh_engine_param *desc = &engine->params[param];
    struct lh_unit *unit = lh_engine_unit_at(engine, desc->unit);
    struct lh_gradient *gradient = &engine->gradients[param];
    uint64_t bytes = desc->count * lh_dtype_bytes(gradient->dtype);
    uint32_t last = chunk_at(engine, unit, desc->first + desc->count - 1);
    for (uint32_t i = chunk_at(engine, unit, desc->first); i <= last; i++)
        engine->chunks[i].landing_count++;
    gradient->issued = 0;
    gradient->copies = 0;
    unit->landing_count++;
    unit->posted_count++;
    unit->landed_bytes += bytes;
    engine->landings[engine->landing_end++ % engine->param_count] = param;
    waiting_hold(engine, unit);
}

static void landed(struct lh_engine *engine, uint32_t param)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, engine->params[param].unit);
    LH_ASSERT(unit->landing_count > 0);
    unit->landing_count--;
    atomic_store(&engine->gradients[param].is_held, false);
    if (unit->landing_count == 0) {
        atomic_fetch_sub(&engine->update_gradient_bytes, unit->landing_bytes);
        unit->landing_bytes = 0;
        lh_norm_consider(engine, unit);
    }
    lh_engine_notify(engine);
}

void lh_landing_copied(struct lh_engine *engine, struct lh_copy *copy)
{
    struct lh_gradient *gradient = &engine->gradients[copy->param];
    LH_ASSERT(gradient->copies > 0 && engine->chunks[copy->chunk].landing_count > 0);
    engine->chunks[copy->chunk].landing_count--;
    if (--gradient->copies == 0 && gradient->issued == engine->params[copy->param].count)
        landed(engine, copy->param);
}

static bool block_take(struct lh_engine *engine, struct lh_chunk *chunk)
{
    uint32_t kept = chunk->unit == engine->landing_unit ? 0 : engine->block_reserve;
    if (chunk->block != LH_BLOCK_NONE)
        return true;
    if (engine->free_block_count <= kept)
        return false;
    chunk->block = engine->free_blocks[--engine->free_block_count];
    return true;
}

/* The next piece of param's gradient: up to the end of a chunk. False: not now. */
static bool piece_copy(struct lh_engine *engine, uint32_t param)
{
    const struct lh_engine_param *desc = &engine->params[param];
    struct lh_gradient *gradient = &engine->gradients[param];
    struct lh_unit *unit = lh_engine_unit_at(engine, desc->unit);
    uint64_t element = desc->first + gradient->issued;
    struct lh_chunk *chunk = &engine->chunks[chunk_at(engine, unit, element)];
    uint64_t count = lh_min_u64(desc->first + desc->count, chunk->first + chunk->count) - element;
    uint64_t element_bytes = lh_dtype_bytes(gradient->dtype);
    struct lh_error err = {0};
    if (!engine->free_copies || !block_take(engine, chunk))
        return false;
    struct lh_copy *copy = lh_copy_take(engine);
    copy->unit = desc->unit;
    copy->param = param;
    copy->chunk = (uint32_t)(chunk - engine->chunks);
    copy->dev = (struct lh_dev_copy){
        .direction = LH_DEV_DIRECTION_OUT,
        .host = engine->blocks_memory + (uint64_t)chunk->block * engine->block_bytes +
                (element - chunk->first) * element_bytes,
        .device = (uint8_t *)(uintptr_t)gradient->pointer + gradient->issued * element_bytes,
        .bytes = count * element_bytes,
        .after = gradient->is_computed,
        .owner = copy,
    };
    lh_step_stats(engine, lh_step_current(engine))->bytes[LH_ENGINE_LINK_COPY_OUT] +=
        count * element_bytes;
    if (engine->dev->ops->submit(engine->dev, &copy->dev, &err) < 0) {
        lh_device_fail(engine, &err, "a gradient's copy");
        return false;
    }
    engine->copies_in_flight++;
    gradient->issued += count;
    gradient->copies++;
    if (gradient->issued == desc->count)
        unit->posted_count--;
    return true;
}

static bool is_posted(const struct lh_engine *engine, uint32_t param)
{
    return engine->gradients[param].pointer &&
           engine->gradients[param].issued < engine->params[param].count;
}

/* The next unit that may take from the reserve; LH_UNIT_NONE: there is none now. */
static uint32_t unit_next(const struct lh_engine *engine)
{
    for (uint32_t i = engine->spill_first; i < engine->spill_count; i++) {
        if (engine->units[engine->spill_queue[i]].posted_count > 0)
            return engine->spill_queue[i];
    }
    for (uint32_t i = engine->update_first; i < engine->update_count; i++) {
        const struct lh_unit *unit = &engine->units[engine->update_queue[i]];
        if (unit->posted_count > 0 && unit->state != LH_UNIT_STATE_ABSENT)
            return engine->update_queue[i];
    }
    return LH_UNIT_NONE;
}

/* All that the unit whose turn it is needs, or as many as are free. */
static void blocks_take(struct lh_engine *engine)
{
    if (engine->landing_unit == LH_UNIT_NONE)
        return;
    const struct lh_unit *unit = &engine->units[engine->landing_unit];
    for (uint32_t i = 0; i < unit->chunk_count; i++) {
        struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + i];
        if (chunk->landing_count > 0 && !block_take(engine, chunk))
            break;
    }
}

/* Whose turn it is; LH_PARAM_NONE: nobody's. [Note: Blocks that come back] */
static uint32_t param_next(struct lh_engine *engine)
{
    if (engine->landing_unit == LH_UNIT_NONE ||
        engine->units[engine->landing_unit].posted_count == 0) {
        engine->landing_unit = unit_next(engine);
        blocks_take(engine);
    }
    if (engine->landing_unit != LH_UNIT_NONE) {
        uint32_t param = engine->units[engine->landing_unit].desc.param_first;
        while (!is_posted(engine, param))
            param++;
        return param;
    }
    for (uint64_t i = engine->landing_first; i < engine->landing_end; i++) {
        uint32_t param = engine->landings[i % engine->param_count];
        const struct lh_unit *unit = &engine->units[engine->params[param].unit];
        /* Gradients that will wait on SSD have no place in memory before they are on their way. */
        bool has_place = !unit->is_deferred || !unit->spills;
        if (is_posted(engine, param) && has_place)
            return param;
        if (!is_posted(engine, param) && i == engine->landing_first)
            engine->landing_first++;
    }
    return LH_PARAM_NONE;
}

bool lh_landing_pump(struct lh_engine *engine)
{
    bool moved = false;
    while (engine->landing_first < engine->landing_end && !atomic_load(&engine->failed)) {
        uint32_t param = param_next(engine);
        if (param == LH_PARAM_NONE || !piece_copy(engine, param))
            break;
        moved = true;
    }
    return moved;
}

void lh_landing_release(struct lh_engine *engine, struct lh_chunk *chunk)
{
    if (chunk->block == LH_BLOCK_NONE)
        return;
    engine->free_blocks[engine->free_block_count++] = chunk->block;
    chunk->block = LH_BLOCK_NONE;
}

void lh_landing_forget(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->chunk_count; i++) {
        lh_landing_release(engine, &engine->chunks[i]);
        engine->chunks[i].landing_count = 0;
    }
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        engine->units[i].landing_count = 0;
        engine->units[i].posted_count = 0;
        engine->units[i].landing_bytes = 0;
        engine->units[i].landed_bytes = 0;
    }
    engine->landing_unit = LH_UNIT_NONE;
    engine->landing_first = 0;
    engine->landing_end = 0;
}

int lh_landing_create(struct lh_engine *engine, struct lh_error *err)
{
    uint64_t element_bytes = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        if (engine->units[i].desc.elements > 0)
            element_bytes = lh_max_u64(element_bytes, lh_dtype_bytes(engine->units[i].desc.dtype));
        if (engine->units[i].chunk_count > engine->block_reserve)
            engine->block_reserve = engine->units[i].chunk_count;
    }
    engine->landing_unit = LH_UNIT_NONE;
    engine->block_bytes = engine->budget.chunk_elements * element_bytes;
    bool has_blocks = element_bytes > 0 && !engine->opts.gradients_in_memory;
    uint64_t count = has_blocks ? engine->budget.gradient_bytes / engine->block_bytes : 0;
    engine->blocks_memory = engine->region + engine->budget.region_bytes +
                            engine->budget.slab_count * engine->budget.slab_bytes;
    engine->free_blocks = lh_alloc_zeroed(engine->alloc, lh_max_u64(count, 1), sizeof(uint32_t));
    engine->landings =
        lh_alloc_zeroed(engine->alloc, lh_max_u64(engine->param_count, 1), sizeof(uint32_t));
    if (!engine->free_blocks || !engine->landings)
        return lh_error_set(err, -ENOMEM, "no memory for the gradients' tables");
    while (engine->free_block_count < count) {
        engine->free_blocks[engine->free_block_count] =
            (uint32_t)count - 1 - engine->free_block_count;
        engine->free_block_count++;
    }
    return 0;
}

void lh_landing_destroy(struct lh_engine *engine)
{
    lh_free(engine->alloc, engine->free_blocks);
    lh_free(engine->alloc, engine->landings);
}
