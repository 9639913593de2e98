#include "base/thread.h"

#include <signal.h>
#include <stdatomic.h>

#include "base/assert.h"

static _Atomic uint32_t fork_count;

static void forked(void)
{
    atomic_fetch_add(&fork_count, 1);
}

static void fork_watch(void)
{
    int rc = pthread_atfork(NULL, NULL, forked);
    LH_ASSERT(rc == 0);
}

uint32_t lh_thread_fork_count(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int rc = pthread_once(&once, fork_watch);
    LH_ASSERT(rc == 0);
    return atomic_load(&fork_count);
}

int lh_thread_start(pthread_t *thread_out, const pthread_attr_t *attributes, void *(*run)(void *),
                    void *context)
{
    sigset_t blocked;
    sigset_t before;
    sigfillset(&blocked);
    sigdelset(&blocked, SIGSEGV);
    sigdelset(&blocked, SIGBUS);
    sigdelset(&blocked, SIGFPE);
    sigdelset(&blocked, SIGILL);
    /* A thread inherits the signal mask of its creator. */
    int mask_rc = pthread_sigmask(SIG_SETMASK, &blocked, &before);
    LH_ASSERT(mask_rc == 0);
    int rc = pthread_create(thread_out, attributes, run, context);
    mask_rc = pthread_sigmask(SIG_SETMASK, &before, NULL);
    LH_ASSERT(mask_rc == 0);
    return -rc;
}
