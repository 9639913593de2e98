/*
 * The start of a thread of lohan's own.
 *
 * A signal's handler belongs on the program's own threads, so all signals are blocked in ours.
 * Faults stay deliverable: they go to the thread that made them, and a crash reporter wants its
 * stack.
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
 * Errors: -errno of pthread_create (-EAGAIN: the system has no more threads); *thread_out is
 *         undefined then.
 */
int lh_thread_start(pthread_t *thread_out, const pthread_attr_t *attributes, void *(*run)(void *),
                    void *context) LH_MUST_CHECK;

/*
 * How often the calling process is a child of fork() since the first call, which another process
 * may have made. What was made under another number has no threads here, and its mutexes may be
 * locked for ever.
 */
uint32_t lh_thread_fork_count(void);

#endif
