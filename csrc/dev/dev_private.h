/*
 * Bookkeeping of copies in flight, shared by the backends of csrc/dev. Only the backends and tests
 * include this file.
 *
 * A lane is a queue of copies: each direction's, which has the direction's number, and the side
 * queue if there is one. A lane's copies finish in the order of submission, so a copy is identified
 * by its number in its lane, and it has finished once the lane's ended_count has reached that
 * number:
 *
 *      owner: take --> slots --> whoever copies: end --> owner: poll
 *             taken_count        ended_count             polled_count
 *
 * Thread: take, untake, poll, drop: the owner. end: the lane's copying thread, one at a time.
 */
#ifndef LH_DEV_DEV_PRIVATE_H
#define LH_DEV_DEV_PRIVATE_H

#include <stdatomic.h>

#include "dev/dev.h"

#define LH_DEV_LANE_SIDE LH_DEV_DIRECTION_COUNT
#define LH_DEV_LANE_COUNT_MAX (LH_DEV_DIRECTION_COUNT + 1)

struct lh_dev_slot {
    struct lh_dev_copy *copy;
    uint64_t submitted_ns;
    uint64_t started_ns;
    uint64_t completed_ns;
    uint64_t behind_count; /* emu: the other lane's ended_count that this copy waits for */
};

struct lh_dev_lane {
    struct lh_dev_slot *slots; /* copy n is in slot n % copy_count */
    uint64_t taken_count;
    uint64_t polled_count;
    _Atomic uint64_t ended_count;
};

/* Every backend begins with this struct. */
struct lh_dev_base {
    struct lh_dev dev;
    struct lh_alloc *alloc;
    struct lh_waker *waker;
    const struct lh_clock *clock;
    uint32_t copy_count;
    uint32_t lane_count; /* more than LH_DEV_DIRECTION_COUNT: there is a side queue */
    struct lh_dev_lane lanes[LH_DEV_LANE_COUNT_MAX];
};

/* opts must have been checked. Errors: -ENOMEM; the caller must call deinit even on error. */
int lh_dev_base_init(struct lh_dev_base *base, const struct lh_dev_ops *ops,
                     const struct lh_dev_opts *opts, struct lh_alloc *alloc, struct lh_error *err)
    LH_MUST_CHECK;
void lh_dev_base_deinit(struct lh_dev_base *base);
/* Add the side queue. Errors: -ENOMEM. */
int lh_dev_base_side_init(struct lh_dev_base *base, struct lh_error *err) LH_MUST_CHECK;
/* The lane of a copy. */
uint32_t lh_dev_base_lane(const struct lh_dev_base *base, const struct lh_dev_copy *copy);

/* Begin a copy, or return -EAGAIN if copy_count copies are in flight. Asserts preconditions. */
int lh_dev_base_take(struct lh_dev_base *base, struct lh_dev_copy *copy,
                     struct lh_dev_slot **slot_out) LH_MUST_CHECK;

/* Undo the last lh_dev_base_take() of a lane, because the copy could not be started. */
void lh_dev_base_untake(struct lh_dev_base *base, uint32_t lane);

/* The slot of a lane's oldest unfinished copy, which the next lh_dev_base_end() finishes. */
struct lh_dev_slot *lh_dev_base_oldest(struct lh_dev_base *base, uint32_t lane);

/*
 * Mark the oldest unfinished copy as finished. The slot's started_ns and completed_ns must be set.
 * After this the copy may be polled and its memory freed. The caller then wakes the owner with
 * lh_dev_base_wake().
 */
void lh_dev_base_end(struct lh_dev_base *base, uint32_t lane);
void lh_dev_base_wake(struct lh_dev_base *base);

/* The vtable's poll: return copies that have finished. */
uint32_t lh_dev_base_poll(struct lh_dev *dev, struct lh_dev_copy **done, uint32_t done_max);

/* Return copies that will never finish, with the given result. */
uint32_t lh_dev_base_drop(struct lh_dev_base *base, int result, struct lh_dev_copy **done,
                          uint32_t done_max);

/* As lh_dev_create(), with checked opts. */
int lh_dev_emu_create(const struct lh_dev_opts *opts, struct lh_alloc *alloc,
                      struct lh_dev **dev_out, struct lh_error *err) LH_MUST_CHECK;
int lh_dev_cuda_create(const struct lh_dev_opts *opts, struct lh_alloc *alloc,
                       struct lh_dev **dev_out, struct lh_error *err) LH_MUST_CHECK;

/* Look up a function of the driver by its exported name, or return NULL: dlsym or a fake of it. */
typedef void *(*lh_dev_cuda_lookup_fn)(void *library, const char *symbol);

/* Create the backend with an already loaded driver; library is borrowed until destroy. */
int lh_dev_cuda_create_from(lh_dev_cuda_lookup_fn lookup, void *library,
                            const struct lh_dev_opts *opts, struct lh_alloc *alloc,
                            struct lh_dev **dev_out, struct lh_error *err) LH_MUST_CHECK;

#endif
