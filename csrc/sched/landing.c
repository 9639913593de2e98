/*
 * Gradients on their way from an accelerator to main memory, where they wait for their update.
 *
 * There they lie in blocks, one a chunk of the unit, element by element at the chunk's places. All
 * blocks have one size, so a free one fits any chunk:
 *
 *      posted (device tensor) -> copies, one a chunk that it touches -> landed: the tensor is free
 *
 * What is posted first is copied first; without a free block it waits for an update to end. Nobody
 * waits for the copies but the unit's own norm, way to SSD, or update.
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

void lh_landing_posted(struct lh_engine *engine, uint32_t param)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, engine->params[param].unit);
    struct lh_gradient *gradient = &engine->gradients[param];
    uint64_t bytes = engine->params[param].count * lh_dtype_bytes(gradient->dtype);
    gradient->issued = 0;
    gradient->copies = 0;
    unit->landing_count++;
    unit->landed_bytes += bytes;
    engine->landings[engine->landing_end++ % engine->param_count] = param;
}

static void landed(struct lh_engine *engine, uint32_t param)
{
    uint32_t index = engine->params[param].unit;
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    LH_ASSERT(unit->landing_count > 0);
    unit->landing_count--;
    atomic_store(&engine->gradients[param].is_held, false);
    lh_engine_notify(engine);
    if (unit->landing_count > 0)
        return;
    lh_norm_consider(engine, unit);
    lh_spill_consider(engine, index);
}

void lh_landing_copied(struct lh_engine *engine, struct lh_copy *copy)
{
    struct lh_gradient *gradient = &engine->gradients[copy->param];
    LH_ASSERT(gradient->copies > 0);
    if (--gradient->copies == 0 && gradient->issued == engine->params[copy->param].count)
        landed(engine, copy->param);
}

static bool block_take(struct lh_engine *engine, struct lh_chunk *chunk)
{
    if (chunk->block != LH_BLOCK_NONE)
        return true;
    if (engine->free_block_count == 0)
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
    struct lh_chunk *chunk =
        &engine->chunks[unit->chunk_first + (uint32_t)(element / engine->budget.chunk_elements)];
    uint64_t count = lh_min_u64(desc->first + desc->count, chunk->first + chunk->count) - element;
    uint64_t element_bytes = lh_dtype_bytes(gradient->dtype);
    struct lh_error err = {0};
    if (!engine->free_copies || !block_take(engine, chunk))
        return false;
    struct lh_copy *copy = lh_copy_take(engine);
    copy->unit = desc->unit;
    copy->param = param;
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
    return true;
}

bool lh_landing_pump(struct lh_engine *engine)
{
    bool moved = false;
    while (engine->landing_first < engine->landing_end && !atomic_load(&engine->failed)) {
        uint32_t param = engine->landings[engine->landing_first % engine->param_count];
        if (!piece_copy(engine, param))
            break;
        moved = true;
        if (engine->gradients[param].issued == engine->params[param].count)
            engine->landing_first++;
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
    for (uint32_t i = 0; i < engine->chunk_count; i++)
        lh_landing_release(engine, &engine->chunks[i]);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        engine->units[i].landing_count = 0;
        engine->units[i].landed_bytes = 0;
    }
    engine->landing_first = 0;
    engine->landing_end = 0;
}

int lh_landing_create(struct lh_engine *engine, struct lh_error *err)
{
    uint64_t element_bytes = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        if (engine->units[i].desc.elements > 0)
            element_bytes = lh_max_u64(element_bytes, lh_dtype_bytes(engine->units[i].desc.dtype));
    }
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
