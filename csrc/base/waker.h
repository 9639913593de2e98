/*
 * Lets a thread, the owner, sleep until any of its sources has news. A waker is an eventfd that I/O
 * backends, workers and other threads write to.
 *
 * A writer makes the system call only if the owner sleeps: the owner sets `sleeping`, checks its
 * sources once more, and only then blocks; a writer publishes its news first and then checks
 * `sleeping` (both sequentially consistent), so no wake-up is lost. The notifications of io_uring
 * and libaio always write to fd.
 *
 * Thread: prepare/wait/cancel belong to the owner; lh_waker_wake() is for any thread.
 */
#ifndef LH_BASE_WAKER_H
#define LH_BASE_WAKER_H

#include <stdatomic.h>

#include "base/error.h"

struct lh_waker {
    int fd; /* eventfd, non-blocking */
    _Atomic uint32_t sleeping;
};

/*
 * Owns:   the waker owns fd until lh_waker_deinit().
 * Errors: -errno of eventfd (-EMFILE: too many open files); fd is then -1.
 */
int lh_waker_init(struct lh_waker *waker, struct lh_error *err) LH_MUST_CHECK;
void lh_waker_deinit(struct lh_waker *waker);

/* Announce the intention to sleep; the owner must then check all its sources again. */
void lh_waker_prepare(struct lh_waker *waker);
/* Sleep until woken, or for timeout_ms (-1: no timeout), then reset sleeping and drain fd. */
void lh_waker_wait(struct lh_waker *waker, int timeout_ms);
/* Undo lh_waker_prepare() because a source had news after all. */
void lh_waker_cancel(struct lh_waker *waker);

void lh_waker_wake(struct lh_waker *waker);

#endif
