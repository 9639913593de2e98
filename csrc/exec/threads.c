/*
 * The team of real threads.
 *
 *      owner: submit --> queue (mutex) --> a worker: run --> done (lock-free ring) --> owner: poll
 *
 * mutex M (struct threads.mutex) protects queue, queue_head, queue_count, started_count, start_rc,
 * stopping. It is held for a few instructions, never while a job runs. A job takes milliseconds, so
 * a lock-free queue would save nothing here.
 *
 * outstanding (used only by the owner) is at most queue_depth_max, which is the capacity of queue
 * and done, so neither can overflow.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* CPU_SET, pthread_setname_np */
#endif
#include "exec/exec.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "base/assert.h"
#include "base/ring.h"
#include "base/thread.h"

#define EXEC_QUEUE_DEPTH_MAX (1U << 20)
#define EXEC_NICE_MAX 19

struct threads;

struct worker {
    struct threads *team;
    uint32_t index;
    pthread_t thread;
};

struct threads {
    struct lh_exec exec; /* must be first: callers have a pointer to it */
    struct lh_alloc *alloc;
    struct lh_waker *waker;
    const struct lh_clock *clock;
    int nice;
    uint32_t queue_depth_max;
    uint32_t outstanding; /* submitted and not yet polled; used only by the owner */
    struct worker *workers;
    struct lh_ring done;

    pthread_mutex_t mutex;
    pthread_cond_t has_work;
    pthread_cond_t has_started;
    struct lh_exec_job **queue; /* circular, queue_depth_max entries */
    uint32_t queue_head;
    uint32_t queue_count;
    uint32_t started_count;
    int start_rc; /* the first failure of a worker to apply opts; 0: none */
    bool stopping;
};

static void lock(struct threads *team)
{
    int rc = pthread_mutex_lock(&team->mutex);
    LH_ASSERT(rc == 0);
}

static void unlock(struct threads *team)
{
    int rc = pthread_mutex_unlock(&team->mutex);
    LH_ASSERT(rc == 0);
}

/* Set the calling worker's name and niceness, and report that it has started. */
static void worker_start(struct worker *worker)
{
    struct threads *team = worker->team;
    char name[16];
    int rc = 0;
    snprintf(name, sizeof(name), "lohan-w%u", (unsigned)(worker->index & 0xffff));
    pthread_setname_np(pthread_self(), name); /* cosmetic; ignore errors */
    if (team->nice > 0) {
        /* On Linux niceness belongs to a thread, and 0 means the calling thread. */
        int nice_now = getpriority(PRIO_PROCESS, 0);
        if (setpriority(PRIO_PROCESS, 0, nice_now + team->nice) != 0)
            rc = -errno;
    }
    lock(team);
    team->started_count++;
    if (team->start_rc == 0)
        team->start_rc = rc;
    pthread_cond_signal(&team->has_started);
    unlock(team);
}

/* The next job, or NULL when the team is stopping. */
static struct lh_exec_job *worker_next(struct threads *team)
{
    struct lh_exec_job *job = NULL;
    lock(team);
    while (team->queue_count == 0 && !team->stopping)
        pthread_cond_wait(&team->has_work, &team->mutex);
    if (!team->stopping) {
        job = team->queue[team->queue_head];
        team->queue_head = (team->queue_head + 1) % team->queue_depth_max;
        team->queue_count--;
    }
    unlock(team);
    return job;
}

static void *worker_main(void *context)
{
    struct worker *worker = context;
    struct threads *team = worker->team;
    struct lh_exec_job *job = NULL;
    worker_start(worker);
    while ((job = worker_next(team)) != NULL) {
        job->worker_index = worker->index;
        job->started_ns = lh_clock_now_ns(team->clock);
        job->run(job);
        job->ended_ns = lh_clock_now_ns(team->clock);
        bool published =
            lh_ring_push(&team->done, (struct lh_ring_message){.words = {(uintptr_t)job}});
        LH_ASSERT(published);
        /* The owner may have polled and freed the job by now. */
        if (team->waker)
            lh_waker_wake(team->waker);
    }
    return NULL;
}

static int threads_submit(struct lh_exec *exec, struct lh_exec_job *job)
{
    struct threads *team = (struct threads *)exec;
    LH_ASSERT(job && job->run);
    if (team->outstanding == team->queue_depth_max)
        return -EAGAIN;
    team->outstanding++;
    lock(team);
    LH_ASSERT(team->queue_count < team->queue_depth_max);
    team->queue[(team->queue_head + team->queue_count) % team->queue_depth_max] = job;
    team->queue_count++;
    unlock(team);
    pthread_cond_signal(&team->has_work);
    return 0;
}

static uint32_t threads_poll(struct lh_exec *exec, struct lh_exec_job **done, uint32_t done_max)
{
    struct threads *team = (struct threads *)exec;
    struct lh_ring_message message;
    uint32_t done_count = 0;
    while (done_count < done_max && lh_ring_pop(&team->done, &message))
        done[done_count++] = (struct lh_exec_job *)(uintptr_t)message.words[0];
    LH_ASSERT(team->outstanding >= done_count);
    team->outstanding -= done_count;
    return done_count;
}

/* Stop and join the first thread_count workers. */
static void workers_stop(struct threads *team, uint32_t thread_count)
{
    lock(team);
    team->stopping = true;
    unlock(team);
    pthread_cond_broadcast(&team->has_work);
    for (uint32_t i = 0; i < thread_count; i++) {
        int rc = pthread_join(team->workers[i].thread, NULL);
        LH_ASSERT(rc == 0);
    }
}

static void team_free(struct threads *team)
{
    struct lh_alloc *alloc = team->alloc;
    pthread_cond_destroy(&team->has_started);
    pthread_cond_destroy(&team->has_work);
    pthread_mutex_destroy(&team->mutex);
    lh_ring_deinit(&team->done, alloc);
    lh_free(alloc, team->queue);
    lh_free(alloc, team->workers);
    lh_free(alloc, team);
}

static void threads_destroy(struct lh_exec *exec)
{
    struct threads *team = (struct threads *)exec;
    workers_stop(team, exec->thread_count);
    team_free(team);
}

static const struct lh_exec_ops threads_ops = {
    .version = LH_EXEC_OPS_VERSION,
    .name = "threads",
    .submit = threads_submit,
    .poll = threads_poll,
    .destroy = threads_destroy,
};

static int opts_check(const struct lh_exec_threads_opts *opts, struct lh_error *err)
{
    if (opts->thread_count == 0 || opts->thread_count > LH_EXEC_THREAD_COUNT_MAX)
        return lh_error_set(err, -EINVAL, "thread_count %u is not within 1 .. %d",
                            opts->thread_count, LH_EXEC_THREAD_COUNT_MAX);
    if (opts->queue_depth_max == 0 || opts->queue_depth_max > EXEC_QUEUE_DEPTH_MAX)
        return lh_error_set(err, -EINVAL, "queue_depth_max %u is not within 1 .. %d",
                            opts->queue_depth_max, EXEC_QUEUE_DEPTH_MAX);
    if (opts->nice < 0 || opts->nice > EXEC_NICE_MAX)
        return lh_error_set(err, -EINVAL, "nice %d is not within 0 .. %d", opts->nice,
                            EXEC_NICE_MAX);
    for (uint32_t i = 0; opts->cpus && i < opts->thread_count; i++)
        if (opts->cpus[i] < 0 || opts->cpus[i] >= CPU_SETSIZE)
            return lh_error_set(err, -EINVAL, "cpu %d for worker %u is not within 0 .. %d",
                                opts->cpus[i], i, CPU_SETSIZE - 1);
    LH_ASSERT(opts->clock);
    return 0;
}

/* Start a worker on *cpu (NULL: on any CPU). Returns 0 or -errno of a pthread function. */
static int worker_create(struct worker *worker, const int *cpu)
{
    pthread_attr_t attributes;
    int rc = -pthread_attr_init(&attributes);
    if (rc < 0)
        return rc;
    if (cpu) {
        cpu_set_t cpus;
        CPU_ZERO(&cpus);
        CPU_SET((size_t)*cpu, &cpus);
        rc = -pthread_attr_setaffinity_np(&attributes, sizeof(cpus), &cpus);
    }
    if (rc == 0)
        rc = lh_thread_start(&worker->thread, &attributes, worker_main, worker);
    pthread_attr_destroy(&attributes);
    return rc;
}

/* Start all workers and wait until each one is ready. On failure, stop those that were started. */
static int workers_create(struct threads *team, const struct lh_exec_threads_opts *opts,
                          struct lh_error *err)
{
    int rc = 0;
    uint32_t count = 0;
    for (; count < opts->thread_count && rc == 0; count++) {
        team->workers[count] = (struct worker){.team = team, .index = count};
        rc = worker_create(&team->workers[count], opts->cpus ? &opts->cpus[count] : NULL);
        if (rc != 0)
            break;
    }
    if (rc == 0) {
        lock(team);
        while (team->started_count < count)
            pthread_cond_wait(&team->has_started, &team->mutex);
        rc = team->start_rc;
        unlock(team);
        if (rc == 0)
            return 0;
        lh_error_set(err, rc, "cannot set nice +%d: %s", opts->nice, strerror(-rc));
    } else if (opts->cpus && rc == -EINVAL) {
        lh_error_set(err, rc, "cpu %d for worker %u is not available to this process",
                     opts->cpus[count], count);
    } else {
        lh_error_set(err, rc, "only %u of %u threads could be started: %s (see ulimit -u, -v)",
                     count, opts->thread_count, strerror(-rc));
    }
    workers_stop(team, count);
    return rc;
}

int lh_exec_threads_create(const struct lh_exec_threads_opts *opts, struct lh_alloc *alloc,
                           struct lh_exec **exec_out, struct lh_error *err)
{
    *exec_out = NULL;
    LH_TRY(opts_check(opts, err));
    struct threads *team = lh_alloc_zeroed(alloc, 1, sizeof(*team));
    if (!team)
        return lh_error_set(err, -ENOMEM, "no memory for a team of %u workers", opts->thread_count);
    team->exec = (struct lh_exec){.ops = &threads_ops, .thread_count = opts->thread_count};
    team->alloc = alloc;
    team->waker = opts->waker;
    team->clock = opts->clock;
    team->nice = opts->nice;
    team->queue_depth_max = opts->queue_depth_max;
    int rc = -pthread_mutex_init(&team->mutex, NULL);
    LH_ASSERT(rc == 0);
    rc = -pthread_cond_init(&team->has_work, NULL);
    LH_ASSERT(rc == 0);
    rc = -pthread_cond_init(&team->has_started, NULL);
    LH_ASSERT(rc == 0);
    team->workers = lh_alloc_zeroed(alloc, opts->thread_count, sizeof(*team->workers));
    team->queue = lh_alloc_zeroed(alloc, opts->queue_depth_max, sizeof(struct lh_exec_job *));
    if (!team->workers || !team->queue)
        rc = lh_error_set(err, -ENOMEM, "no memory for %u workers and a queue of %u jobs",
                          opts->thread_count, opts->queue_depth_max);
    if (rc == 0)
        rc = lh_ring_init(&team->done, alloc, opts->queue_depth_max, err);
    if (rc == 0)
        rc = workers_create(team, opts, err);
    if (rc < 0) {
        team_free(team);
        return rc;
    }
    *exec_out = &team->exec;
    return 0;
}
