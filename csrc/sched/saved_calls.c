/* Saved tensors: the functions that computing threads call (saved.h). */
#include "sched/engine_private.h"

static struct lh_saved *saved_at(const struct lh_engine *engine, uint32_t item)
{
    LH_ASSERT(item < engine->opts.saved.item_max);
    return &engine->saved->items[item];
}

int lh_saved_put(struct lh_engine *engine, const void *pointer, uint64_t bytes,
                 enum lh_saved_tier tier, uint32_t *item_out)
{
    struct lh_saved_area *area = engine->saved;
    const struct lh_saved_opts *opts = &engine->opts.saved;
    uint64_t room = opts->store ? opts->transit_bytes : opts->memory_bytes;
    *item_out = LH_SAVED_NONE;
    LH_ASSERT(bytes > 0 && (tier == LH_SAVED_TIER_MEMORY || tier == LH_SAVED_TIER_SSD));
    if (atomic_load(&engine->failed))
        return lh_core_fail_code(engine);
    if (bytes > room)
        return -E2BIG;
    pthread_mutex_lock(&area->mutex);
    struct lh_saved *saved = lh_saved_pop(engine, &area->free);
    pthread_mutex_unlock(&area->mutex);
    if (!saved)
        return -EAGAIN;
    LH_ASSERT(saved->state == LH_SAVED_STATE_FREE);
    saved->tier = tier;
    saved->bytes = bytes;
    saved->pointer = pointer;
    saved->target = NULL;
    saved->offset = LH_RANGE_NONE;
    saved->ssd_offset = LH_RANGE_NONE;
    saved->stays = false;
    saved->is_written = false;
    saved->is_wanted = false;
    saved->is_awaited = false;
    saved->is_arriving = false;
    saved->is_returned = false;
    saved->is_dropped = false;
    saved->has_asked = false;
    atomic_store(&saved->is_taken, false);
    atomic_store(&saved->presence, LH_SAVED_PRESENCE_NONE);
    atomic_fetch_add(&area->put_bytes, bytes);
    lh_stream_record(engine, saved->computed);
    *item_out = (uint32_t)(saved - area->items);
    lh_engine_post(engine, LH_MESSAGE_SAVED_PUT, *item_out, 0, 0);
    return 0;
}

bool lh_saved_is_taken(const struct lh_engine *engine, uint32_t item)
{
    return atomic_load(&saved_at(engine, item)->is_taken);
}

static bool has_room(struct lh_engine *engine, uint64_t bytes_max)
{
    return atomic_load(&engine->saved->put_bytes) <= bytes_max;
}

int lh_saved_room_wait(struct lh_engine *engine, uint64_t bytes_max, int timeout_ms)
{
    return lh_engine_room_wait(engine, has_room, bytes_max, timeout_ms);
}

void lh_saved_fetch(struct lh_engine *engine, uint32_t item, void *target)
{
    struct lh_saved *saved = saved_at(engine, item);
    LH_ASSERT((target != NULL) == (engine->dev != NULL));
    saved->target = target;
    /* The fence can be reused: the copy out that waited for it ends before the copy back begins. */
    lh_stream_record(engine, saved->computed);
    lh_engine_post(engine, LH_MESSAGE_SAVED_FETCH, item, 0, 0);
}

/* Claim the item's bytes for the waiting thread: from now on they cannot be evicted. */
static bool presence_take(struct lh_engine *engine, uint64_t item)
{
    uint32_t here = LH_SAVED_PRESENCE_HERE;
    _Atomic uint32_t *presence = &saved_at(engine, (uint32_t)item)->presence;
    return atomic_compare_exchange_strong(presence, &here, LH_SAVED_PRESENCE_TAKEN) ||
           here == LH_SAVED_PRESENCE_TAKEN;
}

int lh_saved_wait(struct lh_engine *engine, uint32_t item, int timeout_ms)
{
    struct lh_saved *saved = saved_at(engine, item);
    if (!presence_take(engine, item)) {
        struct lh_dev_gap *gap = NULL;
        /* Post the request once: each message counts as progress and would hide a stuck engine. */
        if (!saved->has_asked)
            lh_engine_post(engine, LH_MESSAGE_SAVED_FETCH, item, 1, 0);
        saved->has_asked = true;
        LH_FEATURE_CALL(engine, wait_begun, &gap);
        uint64_t start = lh_core_now(engine);
        int rc = lh_engine_wait_until(engine, presence_take, item, timeout_ms);
        LH_FEATURE_CALL(engine, wait_ended, gap, false);
        lh_engine_post(engine, LH_MESSAGE_WAITED, LH_CHUNK_NONE, start, lh_core_now(engine));
        if (rc <= 0)
            return rc;
    }
    int rc =
        lh_stream_wait(engine, saved->arrived, LH_UNIT_NONE, "waiting for a saved tensor's copy");
    return rc == 0 ? 1 : rc;
}

const uint8_t *lh_saved_address(const struct lh_engine *engine, uint32_t item)
{
    const struct lh_saved *saved = saved_at(engine, item);
    LH_ASSERT(atomic_load(&saved->presence) == LH_SAVED_PRESENCE_TAKEN && !engine->dev);
    return lh_saved_memory(saved);
}

void lh_saved_drop(struct lh_engine *engine, uint32_t item)
{
    const struct lh_saved *saved = saved_at(engine, item);
    LH_ASSERT(atomic_load(&saved->is_taken) || atomic_load(&engine->failed));
    lh_engine_post(engine, LH_MESSAGE_SAVED_DROP, item, 0, 0);
}
