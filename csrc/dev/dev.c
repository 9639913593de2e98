#include "dev/dev.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "dev/dev_private.h"

int lh_dev_create(const char *name, const struct lh_dev_opts *opts, struct lh_alloc *alloc,
                  struct lh_dev **dev_out, struct lh_error *err)
{
    LH_ASSERT(opts->clock);
    *dev_out = NULL;
    if (opts->copy_count == 0 || opts->copy_count > LH_DEV_COPY_COUNT_MAX)
        return lh_error_set(err, -EINVAL, "copy_count %u is not within 1 .. %d", opts->copy_count,
                            LH_DEV_COPY_COUNT_MAX);
    if (strcmp(name, "emu") == 0)
        return lh_dev_emu_create(opts, alloc, dev_out, err);
    if (strcmp(name, "cuda") == 0)
        return lh_dev_cuda_create(opts, alloc, dev_out, err);
    return lh_error_set(err, -EINVAL, "unknown accelerator backend %s (valid: emu, cuda)", name);
}

static int lane_add(struct lh_dev_base *base, struct lh_error *err)
{
    struct lh_dev_lane *lane = &base->lanes[base->lane_count];
    lane->slots = lh_alloc_zeroed(base->alloc, base->copy_count, sizeof(*lane->slots));
    if (!lane->slots)
        return lh_error_set(err, -ENOMEM, "no memory for the records of %u copies",
                            base->copy_count);
    base->lane_count++;
    return 0;
}

int lh_dev_base_init(struct lh_dev_base *base, const struct lh_dev_ops *ops,
                     const struct lh_dev_opts *opts, struct lh_alloc *alloc, struct lh_error *err)
{
    base->dev = (struct lh_dev){.ops = ops};
    base->alloc = alloc;
    base->waker = opts->waker;
    base->clock = opts->clock;
    base->copy_count = opts->copy_count;
    while (base->lane_count < LH_DEV_DIRECTION_COUNT)
        LH_TRY(lane_add(base, err));
    return 0;
}

int lh_dev_base_side_init(struct lh_dev_base *base, struct lh_error *err)
{
    LH_ASSERT(base->lane_count == LH_DEV_LANE_SIDE);
    return lane_add(base, err);
}

void lh_dev_base_deinit(struct lh_dev_base *base)
{
    for (uint32_t i = 0; i < base->lane_count; i++)
        lh_free(base->alloc, base->lanes[i].slots);
}

uint32_t lh_dev_base_lane(const struct lh_dev_base *base, const struct lh_dev_copy *copy)
{
    LH_ASSERT(copy->direction == LH_DEV_DIRECTION_IN ||
              (copy->direction == LH_DEV_DIRECTION_OUT && !copy->is_aside));
    return copy->is_aside && base->lane_count > LH_DEV_LANE_SIDE ? LH_DEV_LANE_SIDE
                                                                 : copy->direction;
}

static struct lh_dev_slot *slot_of(struct lh_dev_base *base, uint32_t lane, uint64_t number)
{
    return &base->lanes[lane].slots[number % base->copy_count];
}

int lh_dev_base_take(struct lh_dev_base *base, struct lh_dev_copy *copy,
                     struct lh_dev_slot **slot_out)
{
    uint32_t lane = lh_dev_base_lane(base, copy);
    LH_ASSERT(copy->bytes > 0 ? copy->host && copy->device : copy->after != NULL);
    *slot_out = NULL;
    if (base->dev.in_flight_count == base->copy_count)
        return -EAGAIN;
    base->dev.in_flight_count++;
    copy->result = -EINPROGRESS;
    *slot_out = slot_of(base, lane, base->lanes[lane].taken_count++);
    **slot_out = (struct lh_dev_slot){.copy = copy, .submitted_ns = lh_clock_now_ns(base->clock)};
    return 0;
}

void lh_dev_base_untake(struct lh_dev_base *base, uint32_t lane)
{
    base->lanes[lane].taken_count--;
    base->dev.in_flight_count--;
}

struct lh_dev_slot *lh_dev_base_oldest(struct lh_dev_base *base, uint32_t lane)
{
    return slot_of(base, lane, atomic_load(&base->lanes[lane].ended_count));
}

void lh_dev_base_end(struct lh_dev_base *base, uint32_t lane)
{
    atomic_fetch_add(&base->lanes[lane].ended_count, 1);
}

void lh_dev_base_wake(struct lh_dev_base *base)
{
    if (base->waker)
        lh_waker_wake(base->waker);
}

/* Remove and return the oldest copy of a lane, with its times and result set. */
static struct lh_dev_copy *lane_pop(struct lh_dev_base *base, uint32_t lane, int result)
{
    struct lh_dev_slot *slot = slot_of(base, lane, base->lanes[lane].polled_count++);
    struct lh_dev_copy *copy = slot->copy;
    copy->started_ns = slot->started_ns;
    copy->completed_ns = slot->completed_ns;
    copy->result = result;
    LH_ASSERT(base->dev.in_flight_count > 0);
    base->dev.in_flight_count--;
    return copy;
}

uint32_t lh_dev_base_poll(struct lh_dev *dev, struct lh_dev_copy **done, uint32_t done_max)
{
    struct lh_dev_base *base = (struct lh_dev_base *)dev;
    uint32_t done_count = 0;
    for (uint32_t i = 0; i < base->lane_count; i++) {
        struct lh_dev_lane *lane = &base->lanes[i];
        uint64_t ended_count = atomic_load(&lane->ended_count);
        while (done_count < done_max && lane->polled_count < ended_count)
            done[done_count++] = lane_pop(base, i, 0);
    }
    return done_count;
}

uint32_t lh_dev_base_drop(struct lh_dev_base *base, int result, struct lh_dev_copy **done,
                          uint32_t done_max)
{
    uint32_t done_count = 0;
    for (uint32_t i = 0; i < base->lane_count; i++) {
        struct lh_dev_lane *lane = &base->lanes[i];
        while (done_count < done_max && lane->polled_count < lane->taken_count) {
            struct lh_dev_slot *slot = slot_of(base, i, lane->polled_count);
            slot->started_ns = slot->submitted_ns;
            slot->completed_ns = lh_clock_now_ns(base->clock);
            done[done_count++] = lane_pop(base, i, result);
        }
    }
    return done_count;
}
