/*
 * Units on an accelerator: copies of main memory's bytes, made in the order of the accelerator's
 * plan (region.c). Gradients are copied in the opposite direction (landing.c).
 *
 * A unit that was changed on the accelerator ([Note: Moved units] in engine.h) is LEAVING between
 * READY and ABSENT: the plan counts its place as free, and a copy into that place waits for the
 * copy out of it.
 *
 * A copy is stale once its unit's update is queued: such a copy is no longer read, and is evicted
 * first. The update itself happens in main memory and no longer needs the accelerator.
 *
 * The unit that the next forward waits for is the last one that backward updates: its copy begins
 * as soon as its first chunk is updated, and the next unit's copy begins after the copy of this
 * unit's last part has begun.
 *
 * If the device keeps operations in order (is_ordered), no thread waits for a copy: a slot's last
 * reader records `released`, copies into the slot wait for that fence, the unit is READY as soon as
 * its copy is submitted, and a thread that gets a pin makes its stream wait for `arrived`.
 *
 * Source: LoHan IV-C and Fuyou 4.4 (FIFO of parameters on the GPU, prefetched as far as there is
 * room); that the last blocks of a forward stay for backward follows from Belady's rule.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sched/engine_private.h"

/* How many ops to search for one that can overtake others, and how many loads may be in flight. */
#define AHEAD_OP_COUNT 64
#define AHEAD_LOAD_COUNT 2

static void state_set(struct lh_unit *unit, enum lh_copy_state state)
{
    LH_ASSERT(lh_states_may(lh_states_copy, (int)unit->copy.state, (int)state));
    unit->copy.state = state;
}

/* Invalidate the copy of a unit about to be updated. Returns false if the copy is pinned. */
static bool update_may_queue(struct lh_engine *engine, struct lh_unit *unit)
{
    (void)engine;
    if (unit->copy.state == LH_COPY_STATE_ABSENT || unit->copy.is_stale)
        return true;
    if (unit->copy.state == LH_COPY_STATE_READY && !lh_unit_claim(unit))
        return false;
    unit->copy.is_stale = true;
    return true;
}

static void copy_arrived(struct lh_engine *engine, struct lh_unit *unit)
{
    state_set(unit, LH_COPY_STATE_READY);
    if (!unit->copy.is_stale)
        lh_unit_grant(engine, unit);
}

/*
 * Whether a unit's bytes are still being copied out of this place, which the plan counts as free.
 */
static bool is_being_left(const struct lh_engine *engine, uint64_t offset, uint64_t bytes)
{
    for (uint32_t i = 0; engine->device->leaving_count > 0 && i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        if (unit->copy.state == LH_COPY_STATE_LEAVING && unit->copy.offset < offset + bytes &&
            offset < unit->copy.offset + unit->desc->place_bytes)
            return true;
    }
    return false;
}

static bool load_is_possible(const struct lh_engine *engine, const struct lh_residency_op *op)
{
    const struct lh_unit *unit = &engine->units[op->unit];
    LH_ASSERT(op->kind == LH_RESIDENCY_OP_LOAD);
    if (is_being_left(engine, op->offset, unit->desc->place_bytes))
        return false;
    bool is_here = unit->state == LH_UNIT_STATE_READY && !lh_unit_is_stale(engine, unit);
    bool is_coming = unit->state == LH_UNIT_STATE_UPDATING && unit->update.chunks_computed > 0 &&
                     engine->device->loading_unit == LH_UNIT_NONE;
    if (is_coming)
        is_coming = LH_FEATURE_ALL(engine, copy_may_precede_update, unit);
    return (is_here || is_coming) && unit->copy.use_count >= op->uses_before &&
           !unit->copy.is_copying && lh_copy_is_free(engine, LH_COPY_USER_UNIT);
}

/* The time that allocating a unit's place takes with LH_ENGINE_DEVICE_NO_REUSE; otherwise 0. */
static uint64_t alloc_ns(const struct lh_engine *engine, uint64_t bytes)
{
    uint64_t rate = atomic_load(&engine->device->alloc_bytes_per_s);
    if ((atomic_load(&engine->device->policy) & LH_ENGINE_DEVICE_NO_REUSE) == 0 || rate == 0)
        return 0;
    return (uint64_t)((unsigned __int128)bytes * UINT64_C(1000000000) / rate);
}

void lh_device_part_end(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(unit->copy.part_count > 0 && engine->device->loads_in_flight > 0);
    LH_ASSERT(unit->copy.is_copying);
    engine->device->loads_in_flight--;
    unit->copy.part_count--;
}

void lh_device_arrived(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(unit->copy.is_copying && unit->copy.part_count == 0);
    unit->copy.is_copying = false;
    copy_arrived(engine, unit);
    lh_update_consider(engine, (uint32_t)(unit - engine->units));
}

static void part_copied(struct lh_engine *engine, struct lh_copy *copy)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, copy->unit);
    lh_device_part_end(engine, unit);
    if (unit->copy.part_count > 0 || engine->device->loading_unit == copy->unit)
        return;
    unit->copy.is_copying = false;
    if (!engine->dev->ops->is_ordered)
        copy_arrived(engine, unit);
    lh_update_consider(engine, copy->unit);
}

bool lh_device_part_copy(struct lh_engine *engine, struct lh_unit *unit, uint64_t first,
                         uint64_t end, void (*done)(struct lh_engine *engine, struct lh_copy *copy))
{
    LH_ASSERT(first < end && end <= unit->desc->bytes);
    LH_ASSERT(unit->copy.state == LH_COPY_STATE_COPYING && unit->copy.is_copying);
    struct lh_copy *copy = lh_copy_take(engine, LH_COPY_USER_UNIT);
    bool is_last = end == unit->desc->bytes;
    copy->done = done;
    copy->what = "a unit's copy";
    copy->unit = (uint32_t)(unit - engine->units);
    copy->dev = (struct lh_dev_copy){
        .direction = LH_DEV_DIRECTION_IN,
        .host = unit->memory + first,
        .device = engine->opts.device_memory + unit->copy.offset + first,
        .bytes = end - first,
        .pause_ns = first == 0 ? alloc_ns(engine, unit->desc->place_bytes) : 0,
        .done = is_last ? unit->copy.arrived : NULL,
    };
    if (!lh_copy_submit(engine, copy))
        return false;
    engine->device->loads_in_flight++;
    unit->copy.part_count++;
    return true;
}

/* Start the copy of the unit's next part; the copy of the last part makes the unit READY. */
static bool part_copy(struct lh_engine *engine, struct lh_unit *unit, uint64_t first, uint64_t end)
{
    if (!lh_device_part_copy(engine, unit, first, end, part_copied))
        return false;
    if (end == unit->desc->bytes && engine->dev->ops->is_ordered)
        copy_arrived(engine, unit);
    return true;
}

/*
 * The number of new bytes at the unit's front: all bytes, or those of the chunks already updated.
 */
static uint64_t new_bytes(const struct lh_engine *engine, const struct lh_unit *unit)
{
    uint32_t count = 0;
    if (unit->state == LH_UNIT_STATE_READY)
        return unit->desc->bytes;
    while (count < unit->chunk_count) {
        const struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + count];
        if (chunk->computed_step != lh_core_step(engine) ||
            chunk->state == LH_CHUNK_STATE_COMPUTING)
            break;
        count++;
    }
    return lh_min_u64(count * engine->budget.chunk_elements * lh_dtype_bytes(unit->desc->dtype),
                      unit->desc->bytes);
}

/* Copy more of the unit that is copied while it is updated. */
static bool load_continue(struct lh_engine *engine)
{
    if (engine->device->loading_unit == LH_UNIT_NONE || !lh_copy_is_free(engine, LH_COPY_USER_UNIT))
        return false;
    struct lh_unit *unit = lh_engine_unit_at(engine, engine->device->loading_unit);
    uint64_t first = engine->device->loading_bytes;
    uint64_t end = new_bytes(engine, unit);
    if (end == first)
        return false;
    engine->device->loading_bytes = end;
    if (end == unit->desc->bytes)
        engine->device->loading_unit = LH_UNIT_NONE;
    return part_copy(engine, unit, first, end);
}

/* Start a unit's copy, and count its bytes for step. */
static void load_start(struct lh_engine *engine, const struct lh_residency_op *op, uint64_t step)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, op->unit);
    LH_ASSERT(unit->copy.state == LH_COPY_STATE_ABSENT);
    LH_ASSERT(!unit->copy.is_copying && unit->copy.part_count == 0);
    LH_ASSERT(op->offset + unit->desc->place_bytes <= engine->opts.device_bytes);
    state_set(unit, LH_COPY_STATE_COPYING);
    unit->copy.offset = op->offset;
    unit->copy.is_stale = false;
    unit->copy.is_copying = true;
    unit->use_count++;
    atomic_store(&unit->copy.is_modified, false);
    atomic_store(&unit->copy.is_from_write_back, unit->copy.host_matches_write_back);
    atomic_fetch_add(&unit->copy.copy_count, 1);
    lh_core_stats(engine, step)->bytes[LH_ENGINE_LINK_COPY_IN] += unit->desc->bytes;
    if (unit->state == LH_UNIT_STATE_READY) {
        bool is_whole = LH_FEATURE_ALL(engine, copy_may_be_whole, unit, step);
        if (is_whole)
            (void)part_copy(engine, unit, 0, unit->desc->bytes);
        return;
    }
    LH_ASSERT(engine->device->loading_unit == LH_UNIT_NONE);
    engine->device->loading_unit = op->unit;
    engine->device->loading_bytes = 0;
    (void)load_continue(engine);
}

static bool evict_is_possible(const struct lh_engine *engine, const struct lh_residency_op *op)
{
    const struct lh_unit *unit = &engine->units[op->unit];
    LH_ASSERT(op->kind == LH_RESIDENCY_OP_EVICT);
    return unit->copy.state == LH_COPY_STATE_READY && unit->copy.use_count >= op->uses_before;
}

/* The unit has left the accelerator. */
static void left(struct lh_engine *engine, struct lh_unit *unit)
{
    state_set(unit, LH_COPY_STATE_ABSENT);
    if ((atomic_load(&engine->device->policy) & LH_ENGINE_DEVICE_NO_REUSE) == 0)
        return;
    uint8_t *address = engine->opts.device_memory + unit->copy.offset;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t skipped = lh_align_up((uintptr_t)address, page) - (uintptr_t)address;
    uint64_t whole = unit->desc->place_bytes - lh_min_u64(unit->desc->place_bytes, skipped);
    if (madvise(address + skipped, whole - whole % page, MADV_DONTNEED) < 0) {
        struct lh_error err = {0};
        lh_error_set(&err, -errno, "madvise: %s", strerror(errno));
        lh_core_device_fail(engine, &err, "memory that is given back");
    }
}

static void out_done(struct lh_engine *engine, struct lh_copy *copy)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, copy->unit);
    LH_ASSERT(unit->copy.state == LH_COPY_STATE_LEAVING && engine->device->leaving_count > 0);
    LH_ASSERT(unit->copy.is_copying);
    engine->device->leaving_count--;
    unit->copy.is_copying = false;
    unit->copy.host_matches_write_back = true;
    atomic_fetch_add(&unit->copy.out_count, 1);
    left(engine, unit);
}

/* Start copying a changed unit back to main memory ([Note: Moved units] in engine.h). */
static void out_start(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(unit->state == LH_UNIT_STATE_READY && !unit->copy.is_copying);
    struct lh_copy *copy = lh_copy_take(engine, LH_COPY_USER_UNIT);
    struct lh_error err = {0};
    struct lh_dev *dev = engine->dev;
    copy->done = out_done;
    copy->what = "a unit's copy back";
    copy->unit = (uint32_t)(unit - engine->units);
    copy->dev = (struct lh_dev_copy){
        .direction = LH_DEV_DIRECTION_OUT,
        .host = unit->memory,
        .device = engine->opts.device_memory + unit->copy.offset,
        .bytes = unit->desc->bytes,
    };
    if (dev->ops->order(dev, LH_DEV_DIRECTION_OUT, unit->copy.released, &err) < 0) {
        lh_core_device_fail(engine, &err, copy->what);
        return;
    }
    if (!lh_copy_submit(engine, copy))
        return;
    lh_core_stats(engine, lh_core_step(engine))->bytes[LH_ENGINE_LINK_COPY_OUT] +=
        unit->desc->bytes;
    engine->device->leaving_count++;
    state_set(unit, LH_COPY_STATE_LEAVING);
    unit->copy.is_copying = true;
}

static bool evict(struct lh_engine *engine, const struct lh_residency_op *op)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, op->unit);
    struct lh_error err = {0};
    if (!evict_is_possible(engine, op))
        return false;
    bool is_new = !unit->copy.is_stale;
    if (is_new && (unit->waiter_count > 0 || !lh_unit_claim(unit)))
        return false;
    LH_ASSERT(lh_unit_pins(unit) == 0);
    /* Read is_modified only after the unit is claimed: until then a reader may set it. */
    bool leaves =
        atomic_load(&unit->copy.is_modified) && is_new && unit->state == LH_UNIT_STATE_READY;
    /*
     * A copy of the unit may still be in flight (on an ordered device, its copy in): retry later.
     */
    if (leaves && (unit->copy.is_copying || !lh_copy_is_free(engine, LH_COPY_USER_UNIT))) {
        atomic_store(&unit->shared.word, LH_UNIT_READY_BIT);
        return false;
    }
    if (engine->dev->ops->order(engine->dev, LH_DEV_DIRECTION_IN, unit->copy.released, &err) < 0)
        lh_core_device_fail(engine, &err, "the order of copies");
    unit->copy.is_stale = false;
    if (leaves)
        out_start(engine, unit);
    else
        left(engine, unit);
    return true;
}

/*
 * Whether an op may start under the policy. Without overlap: only while a thread waits for a load,
 * one copy at a time. Without reuse: the same, for loads only.
 */
static bool is_its_turn(const struct lh_engine *engine, uint64_t at)
{
    const struct lh_region *region = engine->device_region;
    LH_ASSERT(at >= region->op_first && at < region->op_count);
    uint32_t policy = atomic_load(&engine->device->policy);
    bool is_load = region->ops[at].kind == LH_RESIDENCY_OP_LOAD;
    bool stands =
        (policy & LH_ENGINE_DEVICE_NO_OVERLAP) || (is_load && (policy & LH_ENGINE_DEVICE_NO_REUSE));
    if (!stands)
        return true;
    if (lh_copy_in_flight(engine) > 0)
        return false;
    while (at < region->op_count && region->ops[at].kind != LH_RESIDENCY_OP_LOAD)
        at++;
    return at < region->op_count && engine->units[region->ops[at].unit].waiter_count > 0;
}

static bool op_execute(struct lh_engine *engine, uint64_t at)
{
    const struct lh_residency_op *op = &engine->device_region->ops[at];
    if (op->kind == LH_RESIDENCY_OP_NONE)
        return true;
    if (!is_its_turn(engine, at))
        return false;
    if (op->kind == LH_RESIDENCY_OP_EVICT)
        return evict(engine, op);
    if (!load_is_possible(engine, op))
        return false;
    load_start(engine, op, engine->device_region->op_steps[at]);
    return true;
}

static bool is_possible(const struct lh_engine *engine, const struct lh_residency_op *op)
{
    if (op->kind == LH_RESIDENCY_OP_NONE)
        return false;
    return op->kind == LH_RESIDENCY_OP_LOAD ? load_is_possible(engine, op)
                                            : evict_is_possible(engine, op);
}

static bool commutes(const struct lh_region *region, uint64_t at)
{
    for (uint64_t i = region->op_first; i < at; i++) {
        if (!lh_residency_commutes(region->units, &region->ops[i], &region->ops[at]))
            return false;
    }
    return true;
}

/*
 * If the next op has to wait and few loads are in flight, start later ops that commute with all ops
 * before them: backward updates the units last that forward needs first.
 */
static bool ahead_pump(struct lh_engine *engine)
{
    struct lh_region *region = engine->device_region;
    uint64_t end = lh_min_u64(region->op_count, region->op_first + AHEAD_OP_COUNT);
    bool moved = false;
    for (uint64_t i = region->op_first + 1; i < end; i++) {
        struct lh_residency_op *op = &region->ops[i];
        if (engine->device->loads_in_flight >= AHEAD_LOAD_COUNT || atomic_load(&engine->failed))
            break;
        if (!is_possible(engine, op) || !commutes(region, i) || !op_execute(engine, i))
            continue;
        op->kind = LH_RESIDENCY_OP_NONE;
        moved = true;
    }
    return moved;
}

static bool pump_before(struct lh_engine *engine)
{
    struct lh_region *region = engine->device_region;
    bool moved = load_continue(engine);
    while (region->op_first < region->op_count && !atomic_load(&engine->failed)) {
        if (!op_execute(engine, region->op_first))
            break;
        region->op_first++;
        moved = true;
    }
    moved |= ahead_pump(engine);
    return moved;
}

/* The unit's bytes changed without an update, or were rolled back: the device's copy is invalid. */
static void unit_forgotten(struct lh_engine *engine, struct lh_unit *unit)
{
    bool is_mine = update_may_queue(engine, unit);
    LH_ASSERT(is_mine);
    if (engine->device->loading_unit == (uint32_t)(unit - engine->units)) {
        /* The step was aborted: the rest of the unit's bytes will never be computed. */
        LH_ASSERT(unit->copy.part_count == 0);
        engine->device->loading_unit = LH_UNIT_NONE;
        unit->copy.is_copying = false;
        state_set(unit, LH_COPY_STATE_READY);
    }
}

static int fences_create(struct lh_engine *engine, struct lh_error *err)
{
    struct lh_dev *dev = engine->dev;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        LH_TRY(dev->ops->fence_create(dev, &engine->units[i].copy.arrived, err));
        LH_TRY(dev->ops->fence_create(dev, &engine->units[i].copy.released, err));
    }
    for (uint32_t i = 0; i < engine->param_count; i++)
        LH_TRY(dev->ops->fence_create(dev, &engine->gradients[i].is_computed, err));
    return 0;
}

void lh_device_policy_set(struct lh_engine *engine, uint32_t policy, uint64_t alloc_bytes_per_s)
{
    if (!engine->device)
        return; /* the CPU has no policy */
    atomic_store(&engine->device->alloc_bytes_per_s, alloc_bytes_per_s);
    atomic_store(&engine->device->policy, policy);
}

int lh_device_create(struct lh_engine *engine, struct lh_error *err)
{
    LH_TRY(LH_ENGINE_PART_CREATE(engine, device, err));
    engine->device->loading_unit = LH_UNIT_NONE;
    LH_TRY(lh_copy_create(engine, err));
    return fences_create(engine, err);
}

void lh_device_destroy(struct lh_engine *engine)
{
    struct lh_dev *dev = engine->dev;
    lh_stream_synchronize(engine); /* the units' memory is about to be freed */
    for (uint32_t i = 0; engine->units && i < engine->opts.unit_count; i++) {
        /*
         * Order copies after the unit's last reader: destroying the device waits for copies, and so
         * for that reader, too. An error here has been reported before.
         */
        if (engine->units[i].copy.released)
            (void)dev->ops->order(dev, LH_DEV_DIRECTION_IN, engine->units[i].copy.released,
                                  &(struct lh_error){0});
        dev->ops->fence_destroy(dev, engine->units[i].copy.arrived);
        dev->ops->fence_destroy(dev, engine->units[i].copy.released);
    }
    for (uint32_t i = 0; engine->gradients && i < engine->param_count; i++)
        dev->ops->fence_destroy(dev, engine->gradients[i].is_computed);
    lh_copy_destroy(engine);
}

const struct lh_feature lh_device_feature = {
    .name = "device",
    .update_may_queue = update_may_queue,
    .wait_begun = lh_stream_gap_begin,
    .wait_ended = lh_stream_gap_end,
    .stats_correct = lh_stream_stats_correct,
    .unit_forgotten = unit_forgotten,
    .pump_before = pump_before,
};
