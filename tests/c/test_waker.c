#include "base/waker.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/clock.h"
#include "lh_test.h"

#define ROUND_COUNT 20000

struct exchange {
    struct lh_waker there; /* the other thread's */
    struct lh_waker here;  /* the main thread's */
    _Atomic uint32_t ping;
    _Atomic uint32_t pong;
};

static bool is_readable(int fd)
{
    struct pollfd news = {.fd = fd, .events = POLLIN};
    return poll(&news, 1, 0) == 1;
}

/* The owner's protocol: look, announce, look again, sleep. false: slept for ten seconds. */
static bool await(struct lh_waker *waker, _Atomic uint32_t *word, uint32_t value)
{
    struct lh_clock clock = lh_clock_real();
    uint64_t begin_ns = lh_clock_now_ns(&clock);
    while (atomic_load_explicit(word, memory_order_acquire) != value) {
        lh_waker_prepare(waker);
        if (atomic_load_explicit(word, memory_order_acquire) == value) {
            lh_waker_cancel(waker);
            return true;
        }
        lh_waker_wait(waker, 10000);
        if (lh_clock_now_ns(&clock) - begin_ns >= UINT64_C(10000000000))
            return false;
    }
    return true;
}

static void *answer(void *context)
{
    struct exchange *exchange = context;
    for (uint32_t round = 1; round <= ROUND_COUNT; round++) {
        LH_CHECK(await(&exchange->there, &exchange->ping, round));
        atomic_store_explicit(&exchange->pong, round, memory_order_release);
        lh_waker_wake(&exchange->here);
    }
    return NULL;
}

int main(void)
{
    struct lh_clock clock = lh_clock_real();
    struct lh_waker waker;
    struct lh_error err = {0};
    LH_CHECK(lh_waker_init(&waker, &err) == 0);

    lh_test_name("nobody sleeps: waking costs no system call");
    lh_waker_wake(&waker);
    LH_CHECK(!is_readable(waker.fd));
    lh_waker_prepare(&waker);
    lh_waker_cancel(&waker);
    lh_waker_wake(&waker);
    LH_CHECK(!is_readable(waker.fd));

    lh_test_name("a wake between the announcement and the sleep ends the sleep at once, once");
    lh_waker_prepare(&waker);
    lh_waker_wake(&waker);
    lh_waker_wake(&waker);
    LH_CHECK(is_readable(waker.fd));
    lh_waker_wait(&waker, -1);
    LH_CHECK(!is_readable(waker.fd));
    lh_waker_wake(&waker);
    LH_CHECK(!is_readable(waker.fd));

    lh_test_name("a sleep ends at its timeout, and not before");
    uint64_t begin_ns = lh_clock_now_ns(&clock);
    lh_waker_prepare(&waker);
    lh_waker_wait(&waker, 20);
    LH_CHECK(lh_clock_now_ns(&clock) - begin_ns >= UINT64_C(19000000));

    lh_test_name("the kernel's own writes to fd wake too, and are drained");
    uint64_t one = 1;
    LH_CHECK(write(waker.fd, &one, sizeof(one)) == sizeof(one));
    lh_waker_prepare(&waker);
    lh_waker_wait(&waker, -1);
    LH_CHECK(!is_readable(waker.fd));
    lh_waker_deinit(&waker);
    LH_CHECK(waker.fd == -1);

    lh_test_name("%d rounds between two threads: no news is slept through", ROUND_COUNT);
    static struct exchange exchange;
    pthread_t thread;
    LH_CHECK(lh_waker_init(&exchange.here, &err) == 0);
    LH_CHECK(lh_waker_init(&exchange.there, &err) == 0);
    LH_CHECK(pthread_create(&thread, NULL, answer, &exchange) == 0);
    for (uint32_t round = 1; round <= ROUND_COUNT; round++) {
        atomic_store_explicit(&exchange.ping, round, memory_order_release);
        lh_waker_wake(&exchange.there);
        LH_CHECK(await(&exchange.here, &exchange.pong, round));
    }
    LH_CHECK(pthread_join(thread, NULL) == 0);
    lh_waker_deinit(&exchange.here);
    lh_waker_deinit(&exchange.there);
    return 0;
}
