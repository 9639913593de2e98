#include "dev/staged.h"

#include <pthread.h>
#include <string.h>

#include "base/assert.h"
#include "dev/dev_private.h"

#define POLL_COUNT 16

struct fence {
    struct lh_dev_fence *inner;
    uint64_t record_count; /* what was recorded before stands for something else */
    /* The fence stands for a copy: passed when each lane's ended_count has reached this. */
    uint64_t ended_count[LH_DEV_DIRECTION_COUNT];
    uint32_t order_count[LH_DEV_DIRECTION_COUNT]; /* of queued orders after the latest record */
};

/* Later pieces of a lane start after a fence, from copy number on. */
struct order {
    struct fence *fence;
    uint64_t record_count;
    uint64_t number;
};

struct piece {
    struct lh_dev_copy copy; /* the wrapped device's */
    uint8_t *outside;        /* OUT through a slot: where the slot's bytes belong, else NULL */
    bool is_staged;
    bool is_first;
    bool is_last;
};

/* A direction. Its copies are cut into pieces one after another. */
struct lane {
    uint64_t number;       /* of the copy that is being cut; copies are numbered by lh_dev_base */
    uint64_t cut_bytes;    /* of that copy */
    uint64_t behind_count; /* the other lane's ended_count that later copies wait for */
    uint64_t *done_counts; /* of each copy in flight: record_count of its `done` */
    struct order *orders;  /* a ring of order_max */
    uint64_t order_first;
    uint64_t order_end;
    struct piece *pieces; /* a ring of copy_count, in flight from first to end */
    uint64_t piece_first;
    uint64_t piece_end;
    uint8_t *slots;
    uint64_t slot_first; /* a ring of LH_DEV_STAGED_SLOT_COUNT, in use from first to end */
    uint64_t slot_end;
};

struct staged {
    struct lh_dev_base base; /* must be first: callers have a pointer to it */
    struct lh_dev_ops ops;
    struct lh_dev *inner;
    const struct lh_dev_pins *pins;
    uint64_t slot_bytes;
    uint32_t order_max;
    pthread_mutex_t mutex;
    struct lane lanes[LH_DEV_DIRECTION_COUNT];
    struct lh_error failure; /* the first; nothing is submitted after it */
};

static void lock(struct staged *staged)
{
    int rc = pthread_mutex_lock(&staged->mutex);
    LH_ASSERT(rc == 0);
}

static void unlock(struct staged *staged)
{
    int rc = pthread_mutex_unlock(&staged->mutex);
    LH_ASSERT(rc == 0);
}

static enum lh_dev_direction other(enum lh_dev_direction direction)
{
    return direction == LH_DEV_DIRECTION_IN ? LH_DEV_DIRECTION_OUT : LH_DEV_DIRECTION_IN;
}

static struct fence *fence_of(struct lh_dev_fence *fence)
{
    return (struct fence *)(void *)fence;
}

static void fail(struct staged *staged, const struct lh_error *err)
{
    if (staged->failure.code == 0)
        staged->failure = *err;
}

/* --- Fences ------------------------------------------------------------------------------- */

static int staged_fence_create(struct lh_dev *dev, struct lh_dev_fence **fence_out,
                               struct lh_error *err)
{
    struct staged *staged = (struct staged *)dev;
    *fence_out = NULL;
    struct fence *fence = lh_alloc_zeroed(staged->base.alloc, 1, sizeof(*fence));
    if (!fence)
        return lh_error_set(err, -ENOMEM, "no memory for a fence");
    lock(staged);
    int rc = staged->inner->ops->fence_create(staged->inner, &fence->inner, err);
    unlock(staged);
    if (rc < 0) {
        lh_free(staged->base.alloc, fence);
        return rc;
    }
    *fence_out = (struct lh_dev_fence *)(void *)fence;
    return 0;
}

static void staged_fence_destroy(struct lh_dev *dev, struct lh_dev_fence *fence)
{
    struct staged *staged = (struct staged *)dev;
    if (!fence)
        return;
    lock(staged);
    staged->inner->ops->fence_destroy(staged->inner, fence_of(fence)->inner);
    unlock(staged);
    lh_free(staged->base.alloc, fence);
}

/*
 * The fence is about to stand for something else. Queued orders wait for what it stands for now, so
 * their lanes wait for it at once: too early for some pieces, but right. The caller holds M.
 */
static int fence_renew(struct staged *staged, struct fence *fence, struct lh_error *err)
{
    for (int i = 0; i < LH_DEV_DIRECTION_COUNT; i++) {
        if (fence->order_count[i] == 0)
            continue;
        fence->order_count[i] = 0;
        LH_TRY(
            staged->inner->ops->order(staged->inner, (enum lh_dev_direction)i, fence->inner, err));
    }
    fence->record_count++;
    memset(fence->ended_count, 0, sizeof(fence->ended_count));
    return 0;
}

static int staged_record(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream,
                         struct lh_error *err)
{
    struct staged *staged = (struct staged *)dev;
    lock(staged);
    int rc = fence_renew(staged, fence_of(fence), err);
    if (rc == 0)
        rc = staged->inner->ops->record(staged->inner, fence_of(fence)->inner, stream, err);
    unlock(staged);
    return rc;
}

static int staged_wait(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream,
                       struct lh_error *err)
{
    struct staged *staged = (struct staged *)dev;
    return staged->inner->ops->wait(staged->inner, fence_of(fence)->inner, stream, err);
}

/* Copies of the lane from number on start after fence. The caller holds M. */
static int order_add(struct staged *staged, enum lh_dev_direction direction, struct fence *fence,
                     uint64_t number, struct lh_error *err)
{
    struct lane *lane = &staged->lanes[direction];
    lane->behind_count = lh_max_u64(lane->behind_count, fence->ended_count[other(direction)]);
    if (fence->ended_count[0] > 0 || fence->ended_count[1] > 0)
        return 0; /* copies of the same lane are in order anyway */
    bool is_next = lane->number == number && lane->cut_bytes == 0;
    if (is_next || lane->order_end - lane->order_first == staged->order_max)
        return staged->inner->ops->order(staged->inner, direction, fence->inner, err);
    lane->orders[lane->order_end++ % staged->order_max] =
        (struct order){.fence = fence, .record_count = fence->record_count, .number = number};
    fence->order_count[direction]++;
    return 0;
}

/* Pass on the orders that precede the lane's next piece. */
static void orders_apply(struct staged *staged, enum lh_dev_direction direction)
{
    struct lane *lane = &staged->lanes[direction];
    struct lh_error err = {0};
    int rc = 0;
    if (lane->order_first == lane->order_end)
        return;
    lock(staged);
    while (lane->order_first < lane->order_end && rc == 0) {
        const struct order *order = &lane->orders[lane->order_first % staged->order_max];
        if (order->number > lane->number)
            break;
        lane->order_first++;
        if (order->record_count != order->fence->record_count)
            continue; /* fence_renew() has passed it on */
        order->fence->order_count[direction]--;
        rc = staged->inner->ops->order(staged->inner, direction, order->fence->inner, &err);
    }
    unlock(staged);
    if (rc < 0)
        fail(staged, &err);
}

static int staged_order(struct lh_dev *dev, enum lh_dev_direction direction,
                        struct lh_dev_fence *fence, struct lh_error *err)
{
    struct staged *staged = (struct staged *)dev;
    lock(staged);
    int rc = order_add(staged, direction, fence_of(fence),
                       staged->base.lanes[direction].taken_count, err);
    unlock(staged);
    return rc;
}

/* --- Copies ------------------------------------------------------------------------------- */

/* Make the lane's next piece; false if it has to wait for room. */
static bool piece_make(struct staged *staged, const struct lh_dev_copy *copy, struct piece *piece)
{
    struct lane *lane = &staged->lanes[copy->direction];
    uint8_t *host = (uint8_t *)copy->host + lane->cut_bytes;
    uint64_t bytes = copy->bytes - lane->cut_bytes;
    bool is_pinned = false;
    if (staged->inner->in_flight_count == staged->base.copy_count)
        return false;
    bytes = lh_dev_pins_run(staged->pins, host, bytes, &is_pinned);
    *piece = (struct piece){.is_staged = !is_pinned, .is_first = lane->cut_bytes == 0};
    piece->copy = (struct lh_dev_copy){
        .direction = copy->direction,
        .host = host,
        .device = (uint8_t *)copy->device + lane->cut_bytes,
        .bytes = bytes,
        .pause_ns = piece->is_first ? copy->pause_ns : 0,
    };
    if (!is_pinned) {
        if (lane->slot_end - lane->slot_first == LH_DEV_STAGED_SLOT_COUNT)
            return false;
        piece->copy.host =
            lane->slots + lane->slot_end % LH_DEV_STAGED_SLOT_COUNT * staged->slot_bytes;
        piece->copy.bytes = lh_min_u64(bytes, staged->slot_bytes);
        if (copy->direction == LH_DEV_DIRECTION_IN)
            memcpy(piece->copy.host, host, piece->copy.bytes);
        else
            piece->outside = host;
    }
    piece->is_last = lane->cut_bytes + piece->copy.bytes == copy->bytes;
    return true;
}

/* Submit the next piece of the lane's current copy; false if nothing was submitted. */
static bool piece_submit(struct staged *staged, const struct lh_dev_copy *copy)
{
    struct lane *lane = &staged->lanes[copy->direction];
    uint32_t copy_count = staged->base.copy_count;
    struct piece *piece = &lane->pieces[lane->piece_end % copy_count];
    struct lh_error err = {0};
    if (lane->piece_end - lane->piece_first == copy_count || !piece_make(staged, copy, piece))
        return false;
    piece->copy.owner = piece;
    struct fence *done = piece->is_last && copy->done ? fence_of(copy->done) : NULL;
    lock(staged);
    /* A fence that has been recorded since then no longer stands for this copy. */
    if (done && done->record_count == lane->done_counts[lane->number % copy_count])
        piece->copy.done = done->inner;
    int rc = staged->inner->ops->submit(staged->inner, &piece->copy, &err);
    unlock(staged);
    LH_ASSERT(rc != -EAGAIN); /* piece_make() has checked */
    if (rc < 0) {
        fail(staged, &err);
        return false;
    }
    lane->piece_end++;
    lane->slot_end += piece->is_staged;
    lane->cut_bytes += piece->copy.bytes;
    if (piece->is_last) {
        lane->number++;
        lane->cut_bytes = 0;
    }
    return true;
}

/* Submit pieces of the lane's copies while there is room. Returns whether there were any. */
static bool lane_pump(struct staged *staged, enum lh_dev_direction direction)
{
    struct lane *lane = &staged->lanes[direction];
    const struct lh_dev_lane *copies = &staged->base.lanes[direction];
    const _Atomic uint64_t *others_ended = &staged->base.lanes[other(direction)].ended_count;
    for (bool has_any = false;; has_any = true) {
        if (lane->cut_bytes == 0 && staged->failure.code == 0)
            orders_apply(staged, direction);
        if (staged->failure.code != 0 || lane->number == copies->taken_count)
            return has_any;
        const struct lh_dev_slot *slot = &copies->slots[lane->number % staged->base.copy_count];
        if (atomic_load(others_ended) < slot->behind_count || !piece_submit(staged, slot->copy))
            return has_any;
    }
}

static int staged_submit(struct lh_dev *dev, struct lh_dev_copy *copy, struct lh_error *err)
{
    struct staged *staged = (struct staged *)dev;
    struct lane *lane = &staged->lanes[copy->direction];
    struct lh_dev_slot *slot = NULL;
    if (staged->failure.code != 0)
        return lh_error_set(err, staged->failure.code, "%s", staged->failure.message);
    LH_TRY(lh_dev_base_take(&staged->base, copy, &slot));
    uint64_t number = staged->base.lanes[copy->direction].taken_count - 1;
    int rc = 0;
    lock(staged);
    if (copy->after)
        rc = order_add(staged, copy->direction, fence_of(copy->after), number, err);
    if (rc == 0 && copy->done) {
        struct fence *done = fence_of(copy->done);
        rc = fence_renew(staged, done, err);
        done->ended_count[copy->direction] = rc == 0 ? number + 1 : 0;
        lane->done_counts[number % staged->base.copy_count] = done->record_count;
    }
    unlock(staged);
    if (rc < 0) {
        lh_dev_base_untake(&staged->base, copy->direction);
        return rc;
    }
    slot->behind_count = lane->behind_count;
    lane_pump(staged, copy->direction);
    if (staged->failure.code != 0)
        lh_dev_base_wake(&staged->base); /* poll has something to return */
    return 0;
}

/* The wrapped device has returned the lane's oldest piece. */
static void piece_end(struct staged *staged, struct piece *piece)
{
    enum lh_dev_direction direction = piece->copy.direction;
    struct lane *lane = &staged->lanes[direction];
    struct lh_dev_slot *slot = lh_dev_base_oldest(&staged->base, direction);
    LH_ASSERT(piece == &lane->pieces[lane->piece_first % staged->base.copy_count]);
    lane->piece_first++;
    lane->slot_first += piece->is_staged;
    if (piece->copy.result < 0) {
        struct lh_error err = {0};
        lh_error_set(&err, piece->copy.result, "an earlier copy failed: %s",
                     strerror(-piece->copy.result));
        fail(staged, &err);
    }
    if (staged->failure.code != 0)
        return;
    if (piece->outside)
        memcpy(piece->outside, piece->copy.host, piece->copy.bytes);
    if (piece->is_first)
        slot->started_ns = piece->copy.started_ns;
    if (!piece->is_last)
        return;
    slot->completed_ns =
        piece->outside ? lh_clock_now_ns(staged->base.clock) : piece->copy.completed_ns;
    lh_dev_base_end(&staged->base, direction);
}

static uint32_t staged_poll(struct lh_dev *dev, struct lh_dev_copy **done, uint32_t done_max)
{
    struct staged *staged = (struct staged *)dev;
    struct lh_dev_copy *pieces[POLL_COUNT];
    uint32_t piece_count = 0;
    bool has_more = false;
    do { /* pieces come back only after the poll that follows their submit */
        lock(staged);
        piece_count = staged->inner->ops->poll(staged->inner, pieces, POLL_COUNT);
        unlock(staged);
        for (uint32_t i = 0; i < piece_count; i++)
            piece_end(staged, pieces[i]->owner);
        has_more = piece_count == POLL_COUNT;
        for (int i = 0; i < LH_DEV_DIRECTION_COUNT; i++)
            has_more |= lane_pump(staged, (enum lh_dev_direction)i);
    } while (has_more);
    uint32_t done_count = lh_dev_base_poll(dev, done, done_max);
    if (done_count > 0 || staged->failure.code == 0 || staged->inner->in_flight_count > 0)
        return done_count;
    return lh_dev_base_drop(&staged->base, staged->failure.code, done, done_max);
}

/* --- The rest ----------------------------------------------------------------------------- */

static int staged_memory_register(struct lh_dev *dev, void *base, uint64_t bytes,
                                  struct lh_error *err)
{
    struct staged *staged = (struct staged *)dev;
    lock(staged);
    int rc = staged->inner->ops->memory_register(staged->inner, base, bytes, err);
    unlock(staged);
    return rc;
}

static void staged_memory_unregister(struct lh_dev *dev, void *base)
{
    struct staged *staged = (struct staged *)dev;
    lock(staged);
    staged->inner->ops->memory_unregister(staged->inner, base);
    unlock(staged);
}

static int staged_kernel_load(struct lh_dev *dev, const void *image, const char *name,
                              struct lh_dev_kernel **kernel_out, struct lh_error *err)
{
    struct lh_dev *inner = ((struct staged *)dev)->inner;
    return inner->ops->kernel_load(inner, image, name, kernel_out, err);
}

static void staged_kernel_unload(struct lh_dev *dev, struct lh_dev_kernel *kernel)
{
    struct lh_dev *inner = ((struct staged *)dev)->inner;
    inner->ops->kernel_unload(inner, kernel);
}

static int staged_launch(struct lh_dev *dev, struct lh_dev_kernel *kernel, void *stream,
                         uint32_t group_count, uint32_t thread_count, const void *argument,
                         struct lh_error *err)
{
    struct lh_dev *inner = ((struct staged *)dev)->inner;
    return inner->ops->launch(inner, kernel, stream, group_count, thread_count, argument, err);
}

static void staged_free(struct staged *staged)
{
    struct lh_alloc *alloc = staged->base.alloc;
    for (int i = 0; i < LH_DEV_DIRECTION_COUNT; i++) {
        lh_free(alloc, staged->lanes[i].done_counts);
        lh_free(alloc, staged->lanes[i].orders);
        lh_free(alloc, staged->lanes[i].pieces);
    }
    pthread_mutex_destroy(&staged->mutex);
    lh_dev_base_deinit(&staged->base);
    lh_free(alloc, staged);
}

static void staged_destroy(struct lh_dev *dev)
{
    struct staged *staged = (struct staged *)dev;
    struct lh_dev *inner = staged->inner;
    LH_ASSERT(dev->in_flight_count == 0);
    staged_free(staged);
    inner->ops->destroy(inner);
}

static const struct lh_dev_ops staged_ops = {
    .version = LH_DEV_OPS_VERSION,
    .is_ordered = false,
    .fence_create = staged_fence_create,
    .fence_destroy = staged_fence_destroy,
    .record = staged_record,
    .wait = staged_wait,
    .order = staged_order,
    .submit = staged_submit,
    .poll = staged_poll,
    .memory_register = staged_memory_register,
    .memory_unregister = staged_memory_unregister,
    .destroy = staged_destroy,
};

static int lanes_create(struct staged *staged, const struct lh_dev_staged_opts *opts,
                        struct lh_error *err)
{
    struct lh_alloc *alloc = staged->base.alloc;
    staged->order_max = 2 * opts->copy_count;
    for (int i = 0; i < LH_DEV_DIRECTION_COUNT; i++) {
        struct lane *lane = &staged->lanes[i];
        lane->slots = opts->memory.base + (uint64_t)i * opts->memory.bytes / 2;
        lane->done_counts = lh_alloc_zeroed(alloc, opts->copy_count, sizeof(*lane->done_counts));
        lane->orders = lh_alloc_zeroed(alloc, staged->order_max, sizeof(*lane->orders));
        lane->pieces = lh_alloc_zeroed(alloc, opts->copy_count, sizeof(*lane->pieces));
        if (!lane->done_counts || !lane->orders || !lane->pieces)
            return lh_error_set(err, -ENOMEM, "no memory for the pieces of %u copies",
                                opts->copy_count);
    }
    return 0;
}

int lh_dev_staged_create(const struct lh_dev_staged_opts *opts, struct lh_dev *inner,
                         struct lh_alloc *alloc, struct lh_dev **dev_out, struct lh_error *err)
{
    const uint32_t slot_count = LH_DEV_DIRECTION_COUNT * LH_DEV_STAGED_SLOT_COUNT;
    struct lh_dev_opts base_opts = {
        .copy_count = opts->copy_count, .waker = opts->waker, .clock = opts->clock};
    LH_ASSERT(inner->in_flight_count == 0 && opts->copy_count > 0);
    LH_ASSERT(opts->memory.bytes > 0 && opts->memory.bytes % slot_count == 0);
    *dev_out = NULL;
    struct staged *staged = lh_alloc_zeroed(alloc, 1, sizeof(*staged));
    if (!staged)
        return lh_error_set(err, -ENOMEM, "no memory for staged copies");
    int rc = -pthread_mutex_init(&staged->mutex, NULL);
    LH_ASSERT(rc == 0);
    staged->ops = staged_ops;
    staged->ops.name = inner->ops->name;
    if (inner->ops->kernel_load) {
        staged->ops.kernel_load = staged_kernel_load;
        staged->ops.kernel_unload = staged_kernel_unload;
        staged->ops.launch = staged_launch;
    }
    staged->inner = inner;
    staged->pins = opts->pins;
    staged->slot_bytes = opts->memory.bytes / slot_count;
    rc = lh_dev_base_init(&staged->base, &staged->ops, &base_opts, alloc, err);
    if (rc == 0)
        rc = lanes_create(staged, opts, err);
    if (rc < 0) {
        staged_free(staged);
        return rc;
    }
    memcpy(staged->base.dev.note, inner->note, sizeof(inner->note));
    *dev_out = &staged->base.dev;
    return 0;
}
