#include "sim/dev.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"

#define LANE_STREAM LH_DEV_DIRECTION_COUNT
#define LANE_COUNT (LH_DEV_DIRECTION_COUNT + 1)

struct lh_dev_fence {
    uint32_t lane;
    uint64_t ended_count; /* the fence is passed once the lane has ended this many items */
};

struct sim_dev;

/* A copy, or a computation (copy is NULL). */
struct item {
    struct sim_dev *dev;
    uint32_t lane;
    struct lh_sim_transfer transfer;
    struct lh_dev_copy *copy;
    uint64_t behind[LANE_COUNT]; /* how many items each lane must have ended before this begins */
    bool is_done;                /* the item's time is over; it ends after earlier items */
    uint64_t began_ns;
    uint64_t compute_ns;
    lh_sim_fire_fn begin;
    lh_sim_fire_fn end;
    void *context;
};

/* polled <= ended <= begun <= taken; item n is at n % item_count. */
struct lane {
    struct item *items;
    uint64_t item_count;
    uint64_t taken_count;
    uint64_t begun_count;
    uint64_t ended_count;
    uint64_t polled_count;
    uint64_t ended_ns;           /* when the last ended item ended */
    uint64_t behind[LANE_COUNT]; /* copied into each item that is taken from now on */
};

struct sim_dev {
    struct lh_dev dev; /* the first member, because the caller's pointer points to it */
    struct lh_alloc *alloc;
    struct lh_sim_dev_opts opts;
    struct lh_sim_link links[LH_DEV_DIRECTION_COUNT];
    struct lane lanes[LANE_COUNT];
    struct lh_sim_dev_stats stats;
};

static struct item *item_at(const struct lane *lane, uint64_t number)
{
    return &lane->items[number % lane->item_count];
}

static struct lh_sim_link *link_of(struct sim_dev *sim, uint32_t lane)
{
    return &sim->links[sim->opts.link.duplex ? lane : 0];
}

static bool is_dead(const struct sim_dev *sim)
{
    return LH_SIM_HOOK_GET(sim->opts.world, false, dev_is_dead);
}

static bool may_begin(const struct sim_dev *sim, const struct item *item)
{
    LH_ASSERT(item->lane < LANE_COUNT);
    for (uint32_t i = 0; i < LANE_COUNT; i++) {
        if (i != item->lane && sim->lanes[i].ended_count < item->behind[i])
            return false;
    }
    /* A stream executes one item at a time; a link has a queue. */
    const struct lane *lane = &sim->lanes[item->lane];
    return item->copy || lane->begun_count == lane->ended_count;
}

static void compute_done(void *context);

static void item_begin(struct sim_dev *sim, struct item *item)
{
    struct lh_sim_world *world = sim->opts.world;
    sim->lanes[item->lane].begun_count++;
    item->began_ns = world->now_ns;
    if (!item->copy) {
        if (item->begin)
            item->begin(item->context);
        lh_sim_world_at(world, world->now_ns + item->compute_ns, compute_done, item);
        return;
    }
    LH_SIM_HOOK_CALL(world, copy_begun, item->copy);
    lh_sim_link_submit(link_of(sim, item->lane), &item->transfer);
}

static void copy_end(struct sim_dev *sim, struct item *item)
{
    struct lh_dev_copy *copy = item->copy;
    struct lh_sim_world *world = sim->opts.world;
    copy->started_ns = lh_max_u64(item->began_ns, sim->lanes[item->lane].ended_ns);
    copy->completed_ns = world->now_ns;
    copy->result = LH_SIM_HOOK_GET(world, 0, copy_ended, copy);
    lh_sim_world_trace(world, LH_SIM_TRACE_COPY, (uint64_t)item->lane, copy->bytes,
                       (uint64_t)-copy->result);
    if (copy->result == 0)
        sim->stats.bytes[item->lane] += copy->bytes;
}

static bool lane_pump(struct sim_dev *sim, struct lane *lane)
{
    bool moved = false;
    while (!is_dead(sim) && lane->begun_count < lane->taken_count &&
           may_begin(sim, item_at(lane, lane->begun_count))) {
        item_begin(sim, item_at(lane, lane->begun_count));
        moved = true;
    }
    while (!is_dead(sim) && lane->ended_count < lane->begun_count &&
           item_at(lane, lane->ended_count)->is_done) {
        struct item *item = item_at(lane, lane->ended_count);
        if (item->copy)
            copy_end(sim, item);
        else if (item->end)
            item->end(item->context);
        lane->ended_count++;
        lane->ended_ns = sim->opts.world->now_ns;
        moved = true;
    }
    return moved;
}

/* Begin and end all items that can; the end of one may allow an item of another lane to begin. */
static void lanes_pump(struct sim_dev *sim)
{
    bool moved = true;
    while (moved) {
        moved = false;
        for (uint32_t i = 0; i < LANE_COUNT; i++)
            moved |= lane_pump(sim, &sim->lanes[i]);
    }
}

static void compute_done(void *context)
{
    struct item *item = context;
    item->is_done = true;
    lanes_pump(item->dev);
}

static void transfer_done(struct lh_sim_transfer *transfer)
{
    struct item *item = transfer->owner;
    item->is_done = true;
    lanes_pump(item->dev);
}

static struct item *lane_take(struct sim_dev *sim, uint32_t index)
{
    struct lane *lane = &sim->lanes[index];
    uint64_t free_from = index == LANE_STREAM ? lane->ended_count : lane->polled_count;
    LH_ASSERT(lane->taken_count - free_from < lane->item_count);
    struct item *item = item_at(lane, lane->taken_count++);
    *item = (struct item){.dev = sim, .lane = index};
    memcpy(item->behind, lane->behind, sizeof(item->behind));
    return item;
}

static void lane_order(struct lane *lane, const struct lh_dev_fence *fence)
{
    lane->behind[fence->lane] = lh_max_u64(lane->behind[fence->lane], fence->ended_count);
}

static int sim_fence_create(struct lh_dev *dev, struct lh_dev_fence **fence_out,
                            struct lh_error *err)
{
    struct sim_dev *sim = (struct sim_dev *)dev;
    *fence_out = lh_alloc_zeroed(sim->alloc, 1, sizeof(**fence_out));
    return *fence_out ? 0 : lh_error_set(err, -ENOMEM, "no memory for a simulated fence");
}

static void sim_fence_destroy(struct lh_dev *dev, struct lh_dev_fence *fence)
{
    lh_free(((struct sim_dev *)dev)->alloc, fence);
}

static int sim_record(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream,
                      struct lh_error *err)
{
    const struct sim_dev *sim = (const struct sim_dev *)dev;
    (void)stream;
    (void)err;
    *fence = (struct lh_dev_fence){LANE_STREAM, sim->lanes[LANE_STREAM].taken_count};
    return 0;
}

static int sim_wait(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream,
                    struct lh_error *err)
{
    struct sim_dev *sim = (struct sim_dev *)dev;
    (void)stream;
    (void)err;
    lane_order(&sim->lanes[LANE_STREAM], fence);
    return 0;
}

static int sim_order(struct lh_dev *dev, enum lh_dev_direction direction,
                     struct lh_dev_fence *fence, struct lh_error *err)
{
    struct sim_dev *sim = (struct sim_dev *)dev;
    (void)err;
    lane_order(&sim->lanes[direction], fence);
    return 0;
}

static int sim_submit(struct lh_dev *dev, struct lh_dev_copy *copy, struct lh_error *err)
{
    struct sim_dev *sim = (struct sim_dev *)dev;
    uint64_t extra_ns = 0;
    LH_ASSERT(copy->host && copy->device && copy->bytes > 0);
    if (dev->in_flight_count == sim->opts.copy_count)
        return -EAGAIN;
    LH_TRY(LH_SIM_HOOK_GET(sim->opts.world, 0, copy_taken, copy, &extra_ns, err));
    if (copy->after)
        lane_order(&sim->lanes[copy->direction], copy->after);
    struct item *item = lane_take(sim, copy->direction);
    bool is_in = copy->direction == LH_DEV_DIRECTION_IN;
    item->copy = copy;
    item->transfer = (struct lh_sim_transfer){
        .direction = is_in ? LH_SIM_DIRECTION_READ : LH_SIM_DIRECTION_WRITE,
        .bytes = copy->bytes,
        .extra_ns = extra_ns,
        .done = transfer_done,
        .owner = item,
    };
    if (copy->done)
        *copy->done =
            (struct lh_dev_fence){copy->direction, sim->lanes[copy->direction].taken_count};
    dev->in_flight_count++;
    copy->result = -EINPROGRESS;
    lanes_pump(sim);
    return 0;
}

static uint32_t sim_poll(struct lh_dev *dev, struct lh_dev_copy **done, uint32_t done_max)
{
    struct sim_dev *sim = (struct sim_dev *)dev;
    uint32_t count = 0;
    for (uint32_t i = 0; i < LH_DEV_DIRECTION_COUNT; i++) {
        struct lane *lane = &sim->lanes[i];
        uint64_t end = is_dead(sim) ? lane->taken_count : lane->ended_count;
        while (count < done_max && lane->polled_count < end) {
            struct lh_dev_copy *copy = item_at(lane, lane->polled_count)->copy;
            if (lane->polled_count++ >= lane->ended_count)
                copy->result = -EIO;
            done[count++] = copy;
        }
    }
    LH_ASSERT(dev->in_flight_count >= count);
    dev->in_flight_count -= count;
    return count;
}

static int sim_memory_register(struct lh_dev *dev, void *base, uint64_t bytes, struct lh_error *err)
{
    (void)dev;
    (void)err;
    LH_ASSERT(base && bytes > 0);
    return 0;
}

static void sim_memory_unregister(struct lh_dev *dev, void *base)
{
    (void)dev;
    LH_ASSERT(base);
}

static void sim_destroy(struct lh_dev *dev)
{
    struct sim_dev *sim = (struct sim_dev *)dev;
    LH_ASSERT(dev->in_flight_count == 0);
    for (uint32_t i = 0; i < LANE_COUNT; i++)
        lh_free(sim->alloc, sim->lanes[i].items);
    lh_free(sim->alloc, sim);
}

#define OPS(ordered)                                                                               \
    {                                                                                              \
        .version = LH_DEV_OPS_VERSION,                                                             \
        .name = "simulator",                                                                       \
        .is_ordered = (ordered),                                                                   \
        .fence_create = sim_fence_create,                                                          \
        .fence_destroy = sim_fence_destroy,                                                        \
        .record = sim_record,                                                                      \
        .wait = sim_wait,                                                                          \
        .order = sim_order,                                                                        \
        .submit = sim_submit,                                                                      \
        .poll = sim_poll,                                                                          \
        .memory_register = sim_memory_register,                                                    \
        .memory_unregister = sim_memory_unregister,                                                \
        .destroy = sim_destroy,                                                                    \
    }

static const struct lh_dev_ops unordered_ops = OPS(false);
static const struct lh_dev_ops ordered_ops = OPS(true);

int lh_sim_dev_create(const struct lh_sim_dev_opts *opts, struct lh_alloc *alloc,
                      struct lh_dev **dev_out, struct lh_error *err)
{
    *dev_out = NULL;
    LH_ASSERT(opts->copy_count > 0);
    struct sim_dev *sim = lh_alloc_zeroed(alloc, 1, sizeof(*sim));
    if (!sim)
        return lh_error_set(err, -ENOMEM, "no memory for a simulated accelerator");
    sim->dev.ops = opts->is_ordered ? &ordered_ops : &unordered_ops;
    sim->alloc = alloc;
    sim->opts = *opts;
    for (uint32_t i = 0; i < LANE_COUNT; i++) {
        struct lane *lane = &sim->lanes[i];
        lane->item_count = i == LANE_STREAM ? LH_SIM_DEV_COMPUTE_COUNT_MAX : opts->copy_count;
        lane->items = lh_alloc_zeroed(alloc, lane->item_count, sizeof(*lane->items));
        if (!lane->items) {
            sim_destroy(&sim->dev);
            return lh_error_set(err, -ENOMEM, "no memory for %" PRIu64 " simulated copies",
                                lane->item_count);
        }
    }
    for (uint32_t i = 0; i < LH_DEV_DIRECTION_COUNT; i++)
        lh_sim_link_init(&sim->links[i], opts->world, &opts->link, NULL);
    *dev_out = &sim->dev;
    return 0;
}

void lh_sim_dev_compute(struct lh_dev *dev, uint64_t compute_ns, lh_sim_fire_fn begin,
                        lh_sim_fire_fn end, void *context)
{
    struct sim_dev *sim = (struct sim_dev *)dev;
    struct item *item = lane_take(sim, LANE_STREAM);
    item->compute_ns = compute_ns;
    item->begin = begin;
    item->end = end;
    item->context = context;
    lanes_pump(sim);
}

void lh_sim_dev_drop(struct lh_dev *dev)
{
    struct sim_dev *sim = (struct sim_dev *)dev;
    for (uint32_t i = 0; i < LANE_COUNT; i++) {
        struct lane *lane = &sim->lanes[i];
        lane->begun_count = lane->taken_count;
        lane->ended_count = lane->taken_count;
        lane->polled_count = lane->taken_count;
    }
    for (uint32_t i = 0; i < LH_DEV_DIRECTION_COUNT; i++)
        lh_sim_link_drop(&sim->links[i]);
    dev->in_flight_count = 0;
}

void lh_sim_dev_check(struct lh_dev *dev)
{
    struct sim_dev *sim = (struct sim_dev *)dev;
    for (uint32_t i = 0; i < LH_DEV_DIRECTION_COUNT; i++) {
        lh_sim_link_check(&sim->links[i]);
        if (sim->lanes[i].polled_count < sim->lanes[i].ended_count)
            lh_sim_world_fail(sim->opts.world, "finished copies were not polled");
    }
}

const struct lh_sim_dev_stats *lh_sim_dev_stats(const struct lh_dev *dev)
{
    return &((const struct sim_dev *)dev)->stats;
}
