#include "base/thread.h"

#include <signal.h>

#include "base/assert.h"

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
    /* A thread begins with its maker's mask. */
    int mask_rc = pthread_sigmask(SIG_SETMASK, &blocked, &before);
    LH_ASSERT(mask_rc == 0);
    int rc = pthread_create(thread_out, attributes, run, context);
    mask_rc = pthread_sigmask(SIG_SETMASK, &before, NULL);
    LH_ASSERT(mask_rc == 0);
    return -rc;
}
