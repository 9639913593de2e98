/*
 * Saved tensors on the engine's side: see saved.h for the contract, saved_private.h for the states.
 *
 * Memory has two parts: one for tensors that stay, and one for tensors in transit to or from SSD.
 * Transfers of the latter need no help from the caller, so the second part always becomes empty
 * again, however fragmented it is; only tensors that backward is using stay there.
 */
#include <inttypes.h>
#include <string.h>

#include "base/crc32c.h"
#include "sched/engine_private.h"

static struct lh_saved *saved_at(struct lh_engine *engine, uint32_t item)
{
    LH_ASSERT(item < engine->opts.saved.item_max);
    return &engine->saved->items[item];
}

static void state_set(struct lh_saved *saved, enum lh_saved_state state)
{
    LH_ASSERT(lh_states_may(lh_states_saved, (int)saved->state, (int)state));
    saved->state = state;
}

static uint32_t index_of(const struct lh_saved *saved)
{
    return (uint32_t)(saved - saved->engine->saved->items);
}

void lh_saved_push(struct lh_engine *engine, struct lh_saved_queue *queue, uint32_t item)
{
    saved_at(engine, item)->next = LH_SAVED_NONE;
    if (queue->first == LH_SAVED_NONE)
        queue->first = item;
    else
        saved_at(engine, queue->last)->next = item;
    queue->last = item;
}

struct lh_saved *lh_saved_pop(struct lh_engine *engine, struct lh_saved_queue *queue)
{
    if (queue->first == LH_SAVED_NONE)
        return NULL;
    struct lh_saved *saved = saved_at(engine, queue->first);
    queue->first = saved->next;
    return saved;
}

/* Remove item from the queue. Returns false if the queue does not contain it. */
static bool queue_remove(struct lh_engine *engine, struct lh_saved_queue *queue, uint32_t item)
{
    uint32_t before = LH_SAVED_NONE;
    uint32_t at = queue->first;
    while (at != LH_SAVED_NONE && at != item) {
        before = at;
        at = saved_at(engine, at)->next;
    }
    if (at == LH_SAVED_NONE)
        return false;
    if (before == LH_SAVED_NONE)
        queue->first = saved_at(engine, at)->next;
    else
        saved_at(engine, before)->next = saved_at(engine, at)->next;
    if (queue->last == at)
        queue->last = before;
    return true;
}

/* Move item to the front of the queue, if the queue contains it. */
static void queue_raise(struct lh_engine *engine, struct lh_saved_queue *queue, uint32_t item)
{
    if (!queue_remove(engine, queue, item))
        return;
    saved_at(engine, item)->next = queue->first;
    if (queue->first == LH_SAVED_NONE)
        queue->last = item;
    queue->first = item;
}

static uint64_t moved_bytes(const struct lh_saved *saved)
{
    return lh_align_up(saved->bytes, LH_BLOCK_BYTES);
}

uint8_t *lh_saved_memory(const struct lh_saved *saved)
{
    const struct lh_saved_opts *opts = &saved->engine->opts.saved;
    uint64_t first = saved->stays ? opts->transit_bytes : 0;
    return opts->memory + first + saved->offset;
}

static struct lh_range *range_of(struct lh_saved *saved)
{
    struct lh_saved_area *area = saved->engine->saved;
    return saved->stays ? &area->staying : &area->transit;
}

static bool memory_take(struct lh_saved *saved)
{
    LH_ASSERT(saved->offset == LH_RANGE_NONE);
    saved->offset = lh_range_acquire(range_of(saved), moved_bytes(saved));
    return saved->offset != LH_RANGE_NONE;
}

static void memory_give(struct lh_saved *saved)
{
    if (saved->offset == LH_RANGE_NONE)
        return;
    lh_range_release(range_of(saved), saved->offset, moved_bytes(saved));
    saved->offset = LH_RANGE_NONE;
}

static void bytes_count(const struct lh_saved *saved, enum lh_engine_link link, uint64_t bytes)
{
    struct lh_engine_step_stats *stats = lh_core_stats(saved->engine, saved->step);
    stats->bytes[link] += bytes;
    stats->planned_bytes[link] += bytes;
}

static void gone(struct lh_saved *saved)
{
    struct lh_saved_area *area = saved->engine->saved;
    LH_ASSERT(saved->is_dropped);
    memory_give(saved);
    if (saved->ssd_offset != LH_RANGE_NONE)
        lh_range_release(&area->ssd, saved->ssd_offset, moved_bytes(saved));
    state_set(saved, LH_SAVED_STATE_FREE);
    pthread_mutex_lock(&area->mutex);
    lh_saved_push(saved->engine, &area->free, index_of(saved));
    pthread_mutex_unlock(&area->mutex);
}

static void here(struct lh_saved *saved)
{
    atomic_store(&saved->presence, LH_SAVED_PRESENCE_HERE);
    lh_core_notify(saved->engine);
}

static void taken(struct lh_saved *saved)
{
    atomic_store(&saved->is_taken, true);
    uint64_t before = atomic_fetch_sub(&saved->engine->saved->put_bytes, saved->bytes);
    LH_ASSERT(before >= saved->bytes);
    lh_core_notify(saved->engine);
}

/* The bytes are in memory and wanted: send them to the target, or let the reader have them. */
static void arrive(struct lh_saved *saved)
{
    struct lh_engine *engine = saved->engine;
    LH_ASSERT(saved->offset != LH_RANGE_NONE && !saved->is_arriving);
    saved->is_arriving = true;
    if (engine->dev)
        lh_saved_push(engine, &engine->saved->arrivals, index_of(saved));
    else
        here(saved);
}

/* Release what a held tensor no longer needs, unless a copy to its target is in flight. */
static void settle(struct lh_saved *saved)
{
    bool is_moving = saved->engine->dev && saved->is_arriving && !saved->is_returned;
    if (saved->state != LH_SAVED_STATE_HELD || is_moving)
        return;
    if (saved->is_dropped) {
        gone(saved);
    } else if (saved->is_returned) {
        memory_give(saved); /* nothing needs the bytes any more: only the drop is still to come */
    } else if (saved->is_written && !saved->is_wanted) {
        memory_give(saved);
        state_set(saved, LH_SAVED_STATE_AWAY);
    }
}

static void held(struct lh_saved *saved);

static void transferred(struct lh_engine *engine, struct lh_transfer *transfer)
{
    struct lh_saved *saved = saved_at(engine, transfer->unit);
    if (saved->state == LH_SAVED_STATE_READING) {
        held(saved);
        return;
    }
    saved->is_written = true;
    state_set(saved, LH_SAVED_STATE_HELD);
    settle(saved);
}

static void transfer_start(struct lh_saved *saved, enum lh_io_kind kind)
{
    struct lh_engine *engine = saved->engine;
    bool is_read = kind == LH_IO_KIND_READ;
    LH_ASSERT(saved->offset != LH_RANGE_NONE && saved->ssd_offset != LH_RANGE_NONE);
    enum lh_engine_link link = is_read ? LH_ENGINE_LINK_SAVED_READ : LH_ENGINE_LINK_SAVED_WRITE;
    state_set(saved, is_read ? LH_SAVED_STATE_READING : LH_SAVED_STATE_WRITING);
    bytes_count(saved, link, moved_bytes(saved));
    saved->transfer = (struct lh_transfer){
        .source = &engine->saved->source,
        .done = transferred,
        .kind = kind,
        .priority = saved->is_awaited ? LH_PRIORITY_DEMAND : LH_PRIORITY_PREFETCH,
        .link = link,
        .unit = index_of(saved),
        .slab = LH_CHUNK_NONE,
        .slot = lh_store_write_slot(engine->opts.saved.store, 0),
        .offset = saved->ssd_offset,
        .bytes = moved_bytes(saved),
        .buffer = lh_saved_memory(saved),
    };
    lh_transfer_submit(engine, &saved->transfer);
}

/* All bytes of the tensor are in memory. */
static void held(struct lh_saved *saved)
{
    state_set(saved, LH_SAVED_STATE_HELD);
    if (saved->is_dropped) {
        gone(saved);
        return;
    }
    if (saved->is_wanted)
        arrive(saved);
    else if (!saved->stays)
        transfer_start(saved, LH_IO_KIND_WRITE);
}

/* Runs on a worker: copy a tensor in main memory, and compute the checksums of one for SSD. */
static void saved_run(struct lh_exec_job *job)
{
    struct lh_saved *saved = job->context;
    const struct lh_engine *engine = saved->engine;
    uint8_t *memory = lh_saved_memory(saved);
    uint32_t count = 0;
    uint32_t *checksums = NULL;
    if (!saved->stays)
        checksums = lh_store_checksums(engine->opts.saved.store, 0,
                                       lh_store_write_slot(engine->opts.saved.store, 0), &count) +
                    saved->ssd_offset / LH_CHECKSUM_BYTES;
    for (uint64_t at = 0; at < moved_bytes(saved); at += LH_CHECKSUM_BYTES) {
        uint64_t bytes = lh_min_u64(LH_CHECKSUM_BYTES, moved_bytes(saved) - at);
        if (!engine->dev && at < saved->bytes)
            memcpy(memory + at, (const uint8_t *)saved->pointer + at,
                   lh_min_u64(bytes, saved->bytes - at));
        if (checksums)
            checksums[at / LH_CHECKSUM_BYTES] = lh_crc32c(0, memory + at, bytes);
    }
}

static void saved_summed(struct lh_engine *engine, struct lh_job *job)
{
    struct lh_saved *saved = job->exec.context;
    LH_ASSERT(engine->saved->job_count > 0 && saved->state == LH_SAVED_STATE_SUMMING);
    engine->saved->job_count--;
    lh_core_trace_add(engine, (struct lh_engine_trace_event){
                                  .kind = LH_ENGINE_TRACE_SAVED_SUM,
                                  .unit = LH_CHUNK_NONE,
                                  .lane = job->exec.worker_index,
                                  .start_ns = job->exec.started_ns,
                                  .end_ns = job->exec.ended_ns,
                                  .bytes = saved->bytes,
                              });
    if (!engine->dev)
        taken(saved);
    held(saved);
}

static void copied_in(struct lh_engine *engine, struct lh_copy *copy)
{
    struct lh_saved *saved = saved_at(engine, copy->item);
    LH_ASSERT(saved->is_arriving && !saved->is_returned);
    if (!engine->dev->ops->is_ordered)
        here(saved);
    saved->is_returned = true;
    settle(saved);
}

static void copied_out(struct lh_engine *engine, struct lh_copy *copy)
{
    struct lh_saved *saved = saved_at(engine, copy->item);
    taken(saved);
    if (saved->stays) {
        held(saved);
        return;
    }
    state_set(saved, LH_SAVED_STATE_SUMMING);
    lh_saved_push(engine, &engine->saved->ready, copy->item);
}

static void copy_start(struct lh_engine *engine, struct lh_saved *saved,
                       enum lh_dev_direction direction)
{
    bool is_in = direction == LH_DEV_DIRECTION_IN;
    struct lh_copy *copy =
        lh_copy_take(engine, is_in ? LH_COPY_USER_SAVED_IN : LH_COPY_USER_SAVED_OUT);
    copy->done = is_in ? copied_in : copied_out;
    copy->what = is_in ? "a saved tensor's copy back" : "a saved tensor's copy";
    copy->item = index_of(saved);
    copy->unit = LH_UNIT_NONE;
    copy->dev = (struct lh_dev_copy){
        .direction = direction,
        .host = lh_saved_memory(saved),
        .device = is_in ? saved->target : (void *)(uintptr_t)saved->pointer,
        .bytes = saved->bytes,
        /* A copy back waits for all that the stream was given; loads of units need not. */
        .is_aside = is_in,
        .after = saved->computed,
        .done = is_in ? saved->arrived : NULL,
    };
    bytes_count(saved, is_in ? LH_ENGINE_LINK_SAVED_IN : LH_ENGINE_LINK_SAVED_OUT, saved->bytes);
    if (!lh_copy_submit(engine, copy))
        return;
    if (is_in && engine->dev->ops->is_ordered)
        here(saved);
}

/* Start the oldest put. Returns false if it has to wait for room, or if no put is queued. */
static bool put_start(struct lh_engine *engine)
{
    struct lh_saved_area *area = engine->saved;
    if (area->puts.first == LH_SAVED_NONE ||
        (engine->dev && !lh_copy_is_free(engine, LH_COPY_USER_SAVED_OUT)))
        return false;
    struct lh_saved *saved = saved_at(engine, area->puts.first);
    saved->stays = saved->tier == LH_SAVED_TIER_MEMORY || !engine->opts.saved.store;
    if (saved->stays && !lh_range_has(&area->staying, moved_bytes(saved)))
        saved->stays = !engine->opts.saved.store;
    if (!saved->stays && saved->ssd_offset == LH_RANGE_NONE)
        saved->ssd_offset = lh_range_acquire(&area->ssd, moved_bytes(saved));
    bool has_place = saved->stays || saved->ssd_offset != LH_RANGE_NONE;
    if (!has_place || !memory_take(saved))
        return false;
    (void)lh_saved_pop(engine, &area->puts);
    if (engine->dev) {
        state_set(saved, LH_SAVED_STATE_COPYING);
        copy_start(engine, saved, LH_DEV_DIRECTION_OUT);
    } else {
        state_set(saved, LH_SAVED_STATE_SUMMING);
        lh_saved_push(engine, &area->ready, index_of(saved));
    }
    return true;
}

/* Evict the tensor fetched last, among prefetched tensors for which no thread has waited yet. */
static bool room_take_back(struct lh_engine *engine)
{
    struct lh_saved *last = NULL;
    for (uint32_t i = 0; i < engine->opts.saved.item_max; i++) {
        struct lh_saved *saved = saved_at(engine, i);
        bool is_idle = saved->state == LH_SAVED_STATE_HELD && saved->is_written && !engine->dev &&
                       !saved->is_awaited && !saved->is_dropped;
        if (is_idle && (!last || saved->want_order > last->want_order))
            last = saved;
    }
    uint32_t presence = LH_SAVED_PRESENCE_HERE;
    if (!last ||
        !atomic_compare_exchange_strong(&last->presence, &presence, LH_SAVED_PRESENCE_NONE))
        return false;
    last->is_arriving = false;
    memory_give(last);
    state_set(last, LH_SAVED_STATE_AWAY);
    lh_saved_push(engine, &engine->saved->wants, index_of(last));
    return true;
}

/* Start the oldest fetch. Returns false if it has to wait for room, or if no fetch is queued. */
static bool want_start(struct lh_engine *engine)
{
    struct lh_saved_area *area = engine->saved;
    if (area->wants.first == LH_SAVED_NONE)
        return false;
    struct lh_saved *saved = saved_at(engine, area->wants.first);
    while (!memory_take(saved)) {
        if (!saved->is_awaited || !room_take_back(engine))
            return false;
    }
    (void)lh_saved_pop(engine, &area->wants);
    transfer_start(saved, LH_IO_KIND_READ);
    return true;
}

static bool pump_before(struct lh_engine *engine)
{
    struct lh_saved_area *area = engine->saved;
    bool moved = false;
    while (area->arrivals.first != LH_SAVED_NONE &&
           lh_copy_is_free(engine, LH_COPY_USER_SAVED_IN)) {
        copy_start(engine, lh_saved_pop(engine, &area->arrivals), LH_DEV_DIRECTION_IN);
        moved = true;
    }
    while (want_start(engine))
        moved = true;
    while (put_start(engine))
        moved = true;
    while (area->ready.first != LH_SAVED_NONE && area->job_count < LH_SAVED_JOB_COUNT) {
        struct lh_saved *saved = lh_saved_pop(engine, &area->ready);
        LH_ASSERT(saved->state == LH_SAVED_STATE_SUMMING && saved->offset != LH_RANGE_NONE);
        saved->job = (struct lh_job){
            .exec = {.run = saved_run, .context = saved, .work_bytes = 2 * saved->bytes},
            .done = saved_summed,
        };
        area->job_count++;
        lh_job_submit(engine, &saved->job);
        moved = true;
    }
    return moved;
}

static void asked(struct lh_engine *engine, uint32_t item)
{
    struct lh_saved *saved = saved_at(engine, item);
    saved->step = engine->plan_step;
    state_set(saved, LH_SAVED_STATE_QUEUED);
    lh_saved_push(engine, &engine->saved->puts, item);
}

static void wanted(struct lh_engine *engine, uint32_t item, bool is_awaited)
{
    struct lh_saved_area *area = engine->saved;
    struct lh_saved *saved = saved_at(engine, item);
    if (!saved->is_wanted) {
        saved->is_wanted = true;
        saved->want_order = area->want_count++;
        if (saved->state == LH_SAVED_STATE_AWAY)
            lh_saved_push(engine, &area->wants, item);
        else if (saved->state == LH_SAVED_STATE_HELD || saved->state == LH_SAVED_STATE_WRITING)
            arrive(saved);
    }
    if (!is_awaited || saved->is_awaited)
        return;
    saved->is_awaited = true;
    if (saved->state == LH_SAVED_STATE_READING)
        lh_transfer_raise(engine, &saved->transfer);
    else if (saved->state == LH_SAVED_STATE_AWAY)
        queue_raise(engine, &area->wants, item);
}

static void dropped(struct lh_engine *engine, uint32_t item)
{
    struct lh_saved *saved = saved_at(engine, item);
    saved->is_dropped = true;
    if (saved->state != LH_SAVED_STATE_AWAY) {
        settle(saved);
        return;
    }
    /* A tensor that is AWAY may be queued in `wants` for room in memory. */
    (void)queue_remove(engine, &engine->saved->wants, item);
    gone(saved);
}

static bool is_anybody_stuck(const struct lh_engine *engine)
{
    const struct lh_saved_area *area = engine->saved;
    uint32_t wanted = area->wants.first;
    /* A tensor that is only prefetched may wait until a thread waits for it. */
    return area->puts.first != LH_SAVED_NONE ||
           (wanted != LH_SAVED_NONE && area->items[wanted].is_awaited);
}

static void stuck_set(const struct lh_engine *engine, struct lh_error *err)
{
    const struct lh_saved_area *area = engine->saved;
    bool is_put = area->puts.first != LH_SAVED_NONE;
    const struct lh_saved *saved = &area->items[is_put ? area->puts.first : area->wants.first];
    lh_error_set(err, -ENOSPC,
                 "no room to move a saved tensor of %" PRIu64 " bytes %s: main memory for tensors "
                 "in transit has %" PRIu64 " bytes, %" PRIu64
                 " free; for tensors that stay %" PRIu64 " bytes, %" PRIu64 " free; SSD %" PRIu64
                 " bytes, %" PRIu64 " free, where each tensor takes a multiple of %" PRIu64
                 ": raise activation_offload_bytes or io.activation_ssd_bytes, or recompute more "
                 "layers",
                 saved->bytes, is_put ? "out" : "back", area->transit.total_bytes,
                 area->transit.free_bytes, area->staying.total_bytes, area->staying.free_bytes,
                 area->ssd.total_bytes, area->ssd.free_bytes, LH_SAVED_SSD_GRANULE);
}

static int items_create(struct lh_engine *engine, struct lh_error *err)
{
    struct lh_saved_area *area = engine->saved;
    uint32_t count = engine->opts.saved.item_max;
    area->items = lh_alloc_zeroed(engine->alloc, count, sizeof(*area->items));
    if (!area->items)
        return lh_error_set(err, -ENOMEM, "no memory for %u saved tensors", count);
    for (uint32_t i = 0; i < count; i++) {
        area->items[i].engine = engine;
        if (engine->dev) {
            LH_TRY(engine->dev->ops->fence_create(engine->dev, &area->items[i].computed, err));
            LH_TRY(engine->dev->ops->fence_create(engine->dev, &area->items[i].arrived, err));
        }
        lh_saved_push(engine, &area->free, i);
    }
    return 0;
}

int lh_saved_create(struct lh_engine *engine, struct lh_error *err)
{
    const struct lh_saved_opts *opts = &engine->opts.saved;
    const struct lh_saved_queue empty = {LH_SAVED_NONE, LH_SAVED_NONE};
    LH_TRY(LH_ENGINE_PART_CREATE(engine, saved, err));
    struct lh_saved_area *area = engine->saved;
    area->puts = area->ready = area->wants = area->arrivals = area->free = empty;
    area->source = (struct lh_source){
        .ops = &lh_transfer_store_ops, .store = opts->store, .file_first = opts->file_first};
    if (opts->item_max == 0 || opts->transit_bytes > opts->memory_bytes ||
        (opts->store && opts->transit_bytes == 0) ||
        !lh_is_aligned(opts->transit_bytes, LH_BLOCK_BYTES))
        return lh_error_set(err, -EINVAL,
                            "saved tensors: %u at once, %" PRIu64
                            " bytes to pass through of %" PRIu64,
                            opts->item_max, opts->transit_bytes, opts->memory_bytes);
    pthread_mutex_init(&area->mutex, NULL);
    area->has_mutex = true;
    uint64_t ssd_bytes = opts->store ? lh_store_extent(opts->store, 0).bytes : 0;
    LH_TRY(items_create(engine, err));
    if (engine->dev && engine->dev->ops->side_create)
        LH_TRY(engine->dev->ops->side_create(engine->dev, err));
    LH_TRY(lh_range_init(&area->transit, engine->alloc, opts->transit_bytes, LH_BLOCK_BYTES,
                         opts->item_max + 1, err));
    LH_TRY(lh_range_init(&area->staying, engine->alloc, opts->memory_bytes - opts->transit_bytes,
                         LH_BLOCK_BYTES, opts->item_max + 1, err));
    return lh_range_init(&area->ssd, engine->alloc, ssd_bytes, LH_SAVED_SSD_GRANULE,
                         opts->item_max + 1, err);
}

void lh_saved_destroy(struct lh_engine *engine)
{
    struct lh_saved_area *area = engine->saved;
    if (!area)
        return;
    struct lh_range *const ranges[] = {&area->transit, &area->staying, &area->ssd};
    for (uint32_t i = 0; engine->dev && area->items && i < engine->opts.saved.item_max; i++) {
        engine->dev->ops->fence_destroy(engine->dev, area->items[i].computed);
        engine->dev->ops->fence_destroy(engine->dev, area->items[i].arrived);
    }
    for (size_t i = 0; i < LH_COUNT_OF(ranges); i++) {
        if (ranges[i]->holes)
            lh_range_deinit(ranges[i], engine->alloc);
    }
    lh_free(engine->alloc, area->items);
    if (area->has_mutex)
        pthread_mutex_destroy(&area->mutex);
}

static bool message(struct lh_engine *engine, const struct lh_ring_message *message)
{
    uint32_t item = (uint32_t)message->words[1];
    switch ((enum lh_message_kind)message->words[0]) {
    case LH_MESSAGE_SAVED_PUT:
        asked(engine, item);
        return true;
    case LH_MESSAGE_SAVED_FETCH:
        wanted(engine, item, message->words[2] != 0);
        return true;
    case LH_MESSAGE_SAVED_DROP:
        dropped(engine, item);
        return true;
    default:
        return false;
    }
}

static bool is_stuck(const struct lh_engine *engine, struct lh_error *err)
{
    if (!is_anybody_stuck(engine))
        return false;
    stuck_set(engine, err);
    return true;
}

const struct lh_feature lh_saved_feature = {
    .name = "saved",
    .message = message,
    .pump_before = pump_before,
    .is_stuck = is_stuck,
};
