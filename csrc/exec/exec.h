/*
 * A team of worker threads for computations that would keep the engine from processing completions,
 * such as optimizer arithmetic and checksums.
 *
 * A job is a struct in its owner's memory. Submit never blocks; poll returns finished jobs, in the
 * order in which they finish. The vtable lets a simulator run jobs in virtual time.
 *
 * Thread: submit, poll and destroy belong to one owner thread; a worker calls job->run(). destroy
 *         waits for running jobs and discards jobs that were not started, so the owner should
 *         first poll until all jobs have been returned.
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
    void (*run)(struct lh_exec_job *job); /* called on a worker; blocks only on memory access */
    void *context;
    /* the memory traffic of the job, from which a simulator computes its duration; 0: unknown */
    uint64_t work_bytes;
    uint64_t started_ns;   /* set by the team */
    uint64_t ended_ns;     /* set by the team */
    uint32_t worker_index; /* set by the team */
};

struct lh_exec;

struct lh_exec_ops {
    uint32_t version; /* LH_EXEC_OPS_VERSION */
    const char *name;
    /* Returns 0, or -EAGAIN if queue_depth_max jobs are submitted and not yet polled. */
    int (*submit)(struct lh_exec *exec, struct lh_exec_job *job);
    uint32_t (*poll)(struct lh_exec *exec, struct lh_exec_job **done, uint32_t done_max);
    void (*destroy)(struct lh_exec *exec);
};

/* Every implementation begins with this struct. */
struct lh_exec {
    const struct lh_exec_ops *ops;
    uint32_t thread_count;
};

struct lh_exec_threads_opts {
    uint32_t thread_count;    /* 1 .. LH_EXEC_THREAD_COUNT_MAX */
    uint32_t queue_depth_max; /* the maximum number of jobs that are submitted and not yet polled */
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
 * Errors: -EINVAL, -ENOMEM, -EAGAIN (not all threads could be started; the message has their
 *         number), -errno of setpriority(). On error *exec_out is NULL.
 * Thread: the calling thread becomes the owner.
 */
int lh_exec_threads_create(const struct lh_exec_threads_opts *opts, struct lh_alloc *alloc,
                           struct lh_exec **exec_out, struct lh_error *err) LH_MUST_CHECK;

#endif
