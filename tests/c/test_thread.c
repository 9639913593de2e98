/* Test csrc/base/thread.h: the initial state of lohan's own threads. */
#include "base/thread.h"

#include <errno.h>
#include <signal.h>

#include "lh_test.h"

static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};

static void *mask_look(void *context)
{
    LH_CHECK(pthread_sigmask(SIG_BLOCK, NULL, context) == 0);
    return context;
}

static void test_mask(void)
{
    lh_test_name("signals are blocked in the thread, faults are not, and its maker's mask stays");
    sigset_t mine;
    sigset_t before;
    sigset_t after;
    sigset_t its;
    sigemptyset(&mine);
    sigaddset(&mine, SIGUSR1);
    LH_CHECK(pthread_sigmask(SIG_SETMASK, &mine, &before) == 0);
    pthread_t thread;
    void *answer = NULL;
    LH_CHECK(lh_thread_start(&thread, NULL, mask_look, &its) == 0);
    LH_CHECK(pthread_sigmask(SIG_SETMASK, &before, &after) == 0);
    LH_CHECK(pthread_join(thread, &answer) == 0 && answer == &its);
    LH_CHECK(sigismember(&its, SIGINT) == 1 && sigismember(&its, SIGTERM) == 1);
    LH_CHECK(sigismember(&its, SIGUSR1) == 1 && sigismember(&its, SIGCHLD) == 1);
    for (size_t i = 0; i < LH_COUNT_OF(faults); i++)
        LH_CHECK(sigismember(&its, faults[i]) == 0);
    LH_CHECK(sigismember(&after, SIGUSR1) == 1 && sigismember(&after, SIGINT) == 0);
}

static void test_refusal(void)
{
    lh_test_name("a thread that the system refuses is -errno, and its maker's mask stays");
    pthread_attr_t attributes;
    LH_CHECK(pthread_attr_init(&attributes) == 0);
    /* More than there are addresses for. */
    LH_CHECK(pthread_attr_setstacksize(&attributes, (size_t)1 << 60) == 0);
    pthread_t thread;
    sigset_t mask;
    LH_CHECK(lh_thread_start(&thread, &attributes, mask_look, &mask) == -EAGAIN);
    LH_CHECK(pthread_attr_destroy(&attributes) == 0);
    LH_CHECK(pthread_sigmask(SIG_BLOCK, NULL, &mask) == 0 && sigismember(&mask, SIGINT) == 0);
}

int main(void)
{
    test_mask();
    test_refusal();
    return 0;
}
