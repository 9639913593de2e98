/*
 * A device whose copies of unregistered memory go through registered staging memory. It wraps
 * another device, and is used if that one has refused to register some of the memory that is
 * copied (pins.h).
 *
 *      IN, memory that is not registered       owner: memcpy --> slot --> the wrapped device's copy
 *      OUT, memory that is not registered      the wrapped device's copy --> slot --> owner: memcpy
 *      registered memory                       the wrapped device's copy
 *
 * A copy is cut into pieces of at most one slot, or of one registered range. Each direction has
 * LH_DEV_STAGED_SLOT_COUNT slots, and as many pieces in flight. The owner moves bytes in submit and
 * poll; both take at most the time of copying these slots.
 *
 * The device is not ordered (is_ordered in dev.h): a copy's `done` can be recorded only when its
 * last piece is submitted, which may be long after the copy was submitted. A stream's wait for it
 * before poll has returned the copy orders nothing. `after` and order() hold as usual, for fences
 * of copies, too, except that the bytes of an IN copy may be read before the streams' work in
 * front of its fence has been executed. Such work must not write main memory.
 *
 * After an error of the wrapped device, poll returns all copies with it, each once, as soon as no
 * piece is in flight, and submit returns it with the wrapped device's message.
 *
 * Thread: as in dev.h. Mutex M protects fences, orders, and calls of the wrapped device that belong
 *         to its owner. It is never held while bytes are copied.
 */
#ifndef LH_DEV_STAGED_H
#define LH_DEV_STAGED_H

#include "dev/pins.h"

#define LH_DEV_STAGED_SLOT_COUNT 4
/* The staging memory of both directions, with slots of 2 MiB. */
#define LH_DEV_STAGED_BYTES (UINT64_C(16) << 20)

struct lh_dev_staged_opts {
    uint32_t copy_count;            /* the wrapped device's */
    struct lh_waker *waker;         /* the wrapped device's */
    const struct lh_clock *clock;   /* borrowed until destroy */
    const struct lh_dev_pins *pins; /* borrowed until destroy; must not change */
    struct lh_dev_buffer memory;    /* the staging memory, borrowed until destroy */
};

/*
 * Wrap inner, which has no copies in flight.
 *
 * Owns:   *dev_out owns inner; release both with (*dev_out)->ops->destroy().
 * Errors: -ENOMEM; then inner is unchanged.
 */
int lh_dev_staged_create(const struct lh_dev_staged_opts *opts, struct lh_dev *inner,
                         struct lh_alloc *alloc, struct lh_dev **dev_out, struct lh_error *err)
    LH_MUST_CHECK;

#endif
