/*
 * [Note: No wake-up is lost]
 * prepare and wake both exchange `sleeping`, so the two are ordered by that one word. If wake comes
 * second, it reads 1 and writes the eventfd. If prepare comes second, it reads the value that wake
 * wrote (acquire of a release), so the news published before wake is visible when the owner checks
 * again. Plain stores and loads would need a full fence on both sides, which ThreadSanitizer does
 * not support.
 */
#include "base/waker.h"

#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"

int lh_waker_init(struct lh_waker *waker, struct lh_error *err)
{
    atomic_init(&waker->sleeping, 0);
    waker->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (waker->fd < 0) {
        int code = -errno;
        waker->fd = -1;
        return lh_error_set(err, code, "cannot create an eventfd: %s (see ulimit -n)",
                            strerror(-code));
    }
    return 0;
}

void lh_waker_deinit(struct lh_waker *waker)
{
    if (waker->fd >= 0)
        close(waker->fd);
    waker->fd = -1;
}

void lh_waker_prepare(struct lh_waker *waker)
{
    atomic_exchange(&waker->sleeping, 1);
}

void lh_waker_cancel(struct lh_waker *waker)
{
    atomic_exchange(&waker->sleeping, 0);
}

void lh_waker_wait(struct lh_waker *waker, int timeout_ms)
{
    struct pollfd news = {.fd = waker->fd, .events = POLLIN};
    int rc = poll(&news, 1, timeout_ms);
    /* A signal ends the sleep, too: the owner checks its sources and sleeps again. */
    LH_ASSERT(rc >= 0 || errno == EINTR || errno == ENOMEM);
    lh_waker_cancel(waker);
    uint64_t count = 0;
    ssize_t got = read(waker->fd, &count, sizeof(count));
    LH_ASSERT(got == (ssize_t)sizeof(count) || errno == EAGAIN || errno == EINTR);
}

void lh_waker_wake(struct lh_waker *waker)
{
    if (atomic_exchange(&waker->sleeping, 0) == 0)
        return;
    uint64_t one = 1;
    ssize_t put = write(waker->fd, &one, sizeof(one));
    /* EAGAIN: the counter is at its limit, so the descriptor is readable already. */
    LH_ASSERT(put == (ssize_t)sizeof(one) || errno == EAGAIN);
}
