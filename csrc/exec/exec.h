/*
 * A team of workers for work that would keep the engine from processing completions: optimizer
 * arithmetic, checksums.
 *
 * A job is a struct in its owner's memory. Submit never blocks; poll returns finished jobs, in the
 * order in which they finish. The vtable lets a simulator run jobs in virtual time.
 *
 * Thread: submit and poll belong to one owner thread; job->run() is called on a worker. destroy
 *         waits for running jobs and discards jobs not yet started, so the owner drains first.
 */
#ifndef LH_EXEC_EXEC_H
#define LH_EXEC_EXEC_H

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/waker.h"

#define LH_EXEC_OPS_VERSION 1
#define LH_EXEC_THREAD_COUNT_MAX 256

struct lh_exec_job {
    void (*run)(struct lh_exec_job *job); /* runs on a worker; must not block, except on memory */
    void *context;
    /* memory traffic of the job, for a simulator's service time; 0 if unknown */
    uint64_t work_bytes;
    uint64_t started_ns; /* filled by the team */
    uint64_t ended_ns;
    uint32_t worker_index;
};

struct lh_exec;

struct lh_exec_ops {
    uint32_t version; /* LH_EXEC_OPS_VERSION */
    const char *name;
    /* 0, or -EAGAIN if the queue is full */
    int (*submit)(struct lh_exec *exec, struct lh_exec_job *job);
    uint32_t (*poll)(struct lh_exec *exec, struct lh_exec_job **done, uint32_t done_max);
    void (*destroy)(struct lh_exec *exec);
};

/* The first member of every implementation. */
struct lh_exec {
    const struct lh_exec_ops *ops;
    uint32_t thread_count;
};

struct lh_exec_threads_opts {
    uint32_t thread_count;    /* 1 .. LH_EXEC_THREAD_COUNT_MAX */
    uint32_t queue_depth_max; /* the most jobs that are submitted and not yet polled */
    int nice;                 /* 0 .. 19, added to the nice value of the worker threads */
    /* thread i is pinned to cpus[i]; NULL: not pinned. Borrowed for the call. */
    const int *cpus;
    /* woken after each completion; borrowed until destroy; may be NULL */
    struct lh_waker *waker;
    const struct lh_clock *clock; /* borrowed until destroy */
};

/*
 * Start a team of real threads.
 *
 * Owns:   *exec_out owns its threads; release with (*exec_out)->ops->destroy().
 * Errors: -EINVAL, -ENOMEM, -EAGAIN (not all threads could be started; names their number).
 *         *exec_out is NULL then.
 * Thread: the calling thread becomes the owner.
 */
int lh_exec_threads_create(const struct lh_exec_threads_opts *opts, struct lh_alloc *alloc,
                           struct lh_exec **exec_out, struct lh_error *err) LH_MUST_CHECK;

#endif
