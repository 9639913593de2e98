/*
 * What the backends of csrc/dev share: the bookkeeping of copies in flight. Nobody else includes
 * this, but for tests.
 *
 * A lane is a direction. Its copies end in the order of their submits, so that a copy is its number
 * in its lane, and "this copy is over" is "the lane has ended at least so many":
 *
 *      owner: take --> slots --> whoever copies: end --> owner: poll
 *             taken_count        ended_count             polled_count
 *
 * Thread: take, untake, poll, drop: the owner. end: whoever copies, one at a time for a lane.
 */
#ifndef LH_DEV_DEV_PRIVATE_H
#define LH_DEV_DEV_PRIVATE_H

#include <stdatomic.h>

#include "dev/dev.h"

struct lh_dev_slot {
    struct lh_dev_copy *copy;
    uint64_t submitted_ns;
    uint64_t started_ns;
    uint64_t completed_ns;
    uint64_t behind_count; /* emu: what the other lane must have ended before this copy starts */
};

struct lh_dev_lane {
    struct lh_dev_slot *slots; /* copy n is in slot n % copy_count */
    uint64_t taken_count;
    uint64_t polled_count;
    _Atomic uint64_t ended_count;
};

/* First member of every backend. */
struct lh_dev_base {
    struct lh_dev dev;
    struct lh_alloc *alloc;
    struct lh_waker *waker;
    const struct lh_clock *clock;
    uint32_t copy_count;
    struct lh_dev_lane lanes[LH_DEV_DIRECTION_COUNT];
};

/* opts were checked. Errors: -ENOMEM; deinit is due all the same. */
int lh_dev_base_init(struct lh_dev_base *base, const struct lh_dev_ops *ops,
                     const struct lh_dev_opts *opts, struct lh_alloc *alloc, struct lh_error *err)
    LH_MUST_CHECK;
void lh_dev_base_deinit(struct lh_dev_base *base);

/* Begin a copy: 0, or -EAGAIN where copy_count are in flight. Asserts what dev.h demands. */
int lh_dev_base_take(struct lh_dev_base *base, struct lh_dev_copy *copy,
                     struct lh_dev_slot **slot_out) LH_MUST_CHECK;

/* Undo the last take of this direction: it could not be begun after all. */
void lh_dev_base_untake(struct lh_dev_base *base, enum lh_dev_direction direction);

/* The oldest copy of a lane that has not ended: what end() is about. */
struct lh_dev_slot *lh_dev_base_oldest(struct lh_dev_base *base, enum lh_dev_direction direction);

/*
 * That copy is over: its slot's started_ns and completed_ns are set. From here on it may be polled,
 * and its memory be gone; the caller wakes the owner with lh_dev_base_wake().
 */
void lh_dev_base_end(struct lh_dev_base *base, enum lh_dev_direction direction);
void lh_dev_base_wake(struct lh_dev_base *base);

/* The vtable's poll: copies that have ended. */
uint32_t lh_dev_base_poll(struct lh_dev *dev, struct lh_dev_copy **done, uint32_t done_max);

/* Give back copies that nobody will end, with result. */
uint32_t lh_dev_base_drop(struct lh_dev_base *base, int result, struct lh_dev_copy **done,
                          uint32_t done_max);

/* opts were checked; otherwise as lh_dev_create. */
int lh_dev_emu_create(const struct lh_dev_opts *opts, struct lh_alloc *alloc,
                      struct lh_dev **dev_out, struct lh_error *err) LH_MUST_CHECK;
int lh_dev_cuda_create(const struct lh_dev_opts *opts, struct lh_alloc *alloc,
                       struct lh_dev **dev_out, struct lh_error *err) LH_MUST_CHECK;

/* The address of a driver's function by its exported name, or NULL: dlsym. */
typedef void *(*lh_dev_cuda_lookup_fn)(void *library, const char *symbol);

/* With a driver that is loaded already; library is borrowed until destroy. */
int lh_dev_cuda_create_from(lh_dev_cuda_lookup_fn lookup, void *library,
                            const struct lh_dev_opts *opts, struct lh_alloc *alloc,
                            struct lh_dev **dev_out, struct lh_error *err) LH_MUST_CHECK;

#endif
