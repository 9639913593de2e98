/*
 * Starts lohan's threads.
 *
 * Signal handlers should run on the program's own threads, so all signals are blocked in lohan's
 * threads, except those of faults: a fault is signalled to the faulting thread, and a crash
 * reporter needs the stack of that thread.
 *
 * Thread: any.
 */
#ifndef LH_BASE_THREAD_H
#define LH_BASE_THREAD_H

#include <pthread.h>

#include "base/base.h"

/*
 * As pthread_create(), with attributes or NULL.
 *
 * Errors: -errno of pthread_create (-EAGAIN: the system has no more threads); *thread_out is then
 *         undefined.
 */
int lh_thread_start(pthread_t *thread_out, const pthread_attr_t *attributes, void *(*run)(void *),
                    void *context) LH_MUST_CHECK;

/*
 * The number of forks between the first call of this function, possibly in an ancestor process, and
 * the calling process. An object created at another count has no threads in this process, and its
 * mutexes may be locked forever.
 */
uint32_t lh_thread_fork_count(void);

#endif
