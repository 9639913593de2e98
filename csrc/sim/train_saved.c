/* Saved tensors of a part of a block: offloaded after forward, fetched before backward. */
#include "sched/engine_private.h"
#include "sim/train_private.h"

static const struct lh_sim_part *part_of(const struct lh_sim_train *train)
{
    return &train->opts.model->parts[train->part];
}

static uint64_t room_bytes(const struct lh_sim_train *train, uint32_t block, uint64_t otherwise)
{
    uint64_t bytes = train->opts.model->blocks[block].saved_room_bytes;
    return bytes > 0 ? bytes : otherwise;
}

/* The bytes that may be on their way out when the computation continues. */
static uint64_t saved_out_bytes(const struct lh_sim_train *train)
{
    const struct lh_sim_model *model = train->opts.model;
    const struct lh_sim_block *block = &model->blocks[train->block];
    bool is_last = train->part + 1 == block->part_first + block->part_count;
    bool has_next = is_last && train->block + 1 < model->block_count;
    return room_bytes(train, train->block + has_next, train->opts.saved_out_bytes);
}

/* The limit for fetching ahead: fetched tensors take room while the next block computes, too. */
static uint64_t ahead_bytes(const struct lh_sim_train *train)
{
    uint64_t otherwise = train->opts.saved_ahead_bytes;
    uint64_t here = room_bytes(train, train->block, otherwise);
    return train->block == 0 ? here
                             : lh_min_u64(here, room_bytes(train, train->block - 1, otherwise));
}

void lh_sim_train_saved_fetch(struct lh_sim_train *train)
{
    const struct lh_sim_part *part = part_of(train);
    uint64_t most_bytes = ahead_bytes(train);
    while (train->saved_next > 0) {
        uint64_t bytes = train->opts.model->saved[train->saved_next - 1].bytes;
        bool is_needed = part->saved_count > 0 && train->saved_next > part->saved_first;
        if (!is_needed && train->fetched_bytes + bytes > most_bytes)
            break;
        train->saved_next--;
        train->fetched_bytes += bytes;
        void *target = train->opts.dev ? (void *)(uintptr_t)train->opts.nowhere : NULL;
        lh_saved_fetch(train->opts.engine, train->saved_items[train->saved_next], target);
    }
}

void lh_sim_train_saved_drop(struct lh_sim_train *train)
{
    const struct lh_sim_part *part = part_of(train);
    for (uint32_t i = part->saved_first; i < part->saved_first + part->saved_count; i++) {
        lh_saved_drop(train->opts.engine, train->saved_items[i]);
        train->fetched_bytes -= train->opts.model->saved[i].bytes;
    }
    lh_sim_train_saved_fetch(train);
}

int lh_sim_train_saved_put(struct lh_sim_train *train)
{
    const struct lh_sim_part *part = part_of(train);
    for (uint32_t i = part->saved_first; i < part->saved_first + part->saved_count; i++) {
        const struct lh_sim_saved *saved = &train->opts.model->saved[i];
        int rc = lh_saved_put(train->opts.engine, train->opts.nowhere, saved->bytes, saved->tier,
                              &train->saved_items[i]);
        if (rc < 0)
            return rc;
    }
    train->saved_next += part->saved_count;
    return 0;
}

enum lh_sim_look lh_sim_train_saved_wait(struct lh_sim_train *train)
{
    struct lh_engine *engine = train->opts.engine;
    uint32_t item = train->saved_items[part_of(train)->saved_first + train->saved_back - 1];
    uint32_t presence = atomic_load(&engine->saved->items[item].presence);
    if (!lh_sim_train_is_worth_asking(train, presence != LH_SAVED_PRESENCE_NONE))
        return LH_SIM_LOOK_WAIT;
    int rc = lh_saved_wait(engine, item, 0);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    if (rc == 0)
        return LH_SIM_LOOK_WAIT;
    lh_sim_train_times_of(train)->saved_wait_ns += lh_sim_train_waited_ns(train);
    if (--train->saved_back > 0)
        return lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_SAVED);
    return lh_sim_train_compute_begin(train);
}

enum lh_sim_look lh_sim_train_saved_taken(struct lh_sim_train *train)
{
    uint64_t out_bytes = saved_out_bytes(train);
    uint64_t put_bytes = atomic_load(&train->opts.engine->saved->put_bytes);
    if (!lh_sim_train_is_worth_asking(train, put_bytes <= out_bytes))
        return LH_SIM_LOOK_WAIT;
    int rc = lh_saved_room_wait(train->opts.engine, out_bytes, 0);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    if (rc == 0)
        return LH_SIM_LOOK_WAIT;
    lh_sim_train_times_of(train)->saved_wait_ns += lh_sim_train_waited_ns(train);
    return lh_sim_train_part_next(train);
}
