/*
 * The backend that calls pread, pwrite and fdatasync on threads. It works on every kernel and in
 * every container.
 *
 *      owner: submit --> todo (mutex) --> a thread: transfer --> done (lock-free ring) --> poll
 *
 * mutex M (struct threads.mutex) protects todo and stopping. It is held for a few instructions,
 * never during a transfer. At most queue_depth_max requests are in flight, which is the capacity of
 * done, so done cannot overflow.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* pthread_setname_np */
#endif
#include "io/io_private.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/ring.h"
#include "base/thread.h"

#define RETRY_DELAY_NS 1000000

struct threads;

struct thread {
    struct threads *team;
    uint32_t index;
    pthread_t id;
};

struct threads {
    struct lh_io_base base; /* must be first: callers have a pointer to it */
    struct lh_ring done;
    struct thread *threads;
    uint32_t thread_count; /* the number of running threads */
    pthread_mutex_t mutex;
    pthread_cond_t has_work;
    struct lh_io_queue todo;
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

/* Make one system call of a request. Returns the bytes transferred, or -errno. */
static int64_t transfer(const struct lh_io_base *base, const struct lh_io_request *request)
{
    int fd = base->files[request->file_index].fd;
    if (request->kind == LH_IO_KIND_SYNC)
        return fdatasync(fd) == 0 ? 0 : -errno;
    size_t bytes = (size_t)lh_io_base_rest_bytes(base, request);
    off_t offset = (off_t)(request->offset + request->done_bytes);
    ssize_t moved = request->kind == LH_IO_KIND_READ
                        ? pread(fd, lh_io_request_rest(request), bytes, offset)
                        : pwrite(fd, lh_io_request_rest(request), bytes, offset);
    return moved >= 0 ? moved : -errno;
}

static void request_run(const struct lh_io_base *base, struct lh_io_request *request)
{
    while (!lh_io_request_advance(base, request, transfer(base, request))) {
        /* Wait longer each time, so that other threads can release the exhausted resource. */
        struct timespec delay = {.tv_nsec = (long)request->retry_count * RETRY_DELAY_NS};
        if (request->retry_count > 0)
            nanosleep(&delay, NULL);
    }
}

/* The next request, or NULL when the team is stopping. */
static struct lh_io_request *request_next(struct threads *team)
{
    lock(team);
    while (!team->todo.head && !team->stopping)
        pthread_cond_wait(&team->has_work, &team->mutex);
    struct lh_io_request *request = lh_io_queue_pop(&team->todo);
    unlock(team);
    return request;
}

static void *thread_main(void *context)
{
    struct thread *thread = context;
    struct threads *team = thread->team;
    struct lh_io_request *request = NULL;
    char name[16];
    snprintf(name, sizeof(name), "lohan-io%u", (unsigned)(thread->index & 0xff));
    pthread_setname_np(pthread_self(), name); /* cosmetic; ignore errors */
    while ((request = request_next(team)) != NULL) {
        request_run(&team->base, request);
        bool published =
            lh_ring_push(&team->done, (struct lh_ring_message){.words = {(uintptr_t)request}});
        LH_ASSERT(published);
        /* The owner may have polled and freed the request by now. */
        if (team->base.waker)
            lh_waker_wake(team->base.waker);
    }
    return NULL;
}

static int threads_submit(struct lh_io *io, struct lh_io_request *request)
{
    struct threads *team = (struct threads *)io;
    LH_TRY(lh_io_base_take(&team->base, request));
    lock(team);
    lh_io_queue_push(&team->todo, request);
    unlock(team);
    pthread_cond_signal(&team->has_work);
    return 0;
}

static uint32_t threads_poll(struct lh_io *io, struct lh_io_request **done, uint32_t done_max)
{
    struct threads *team = (struct threads *)io;
    struct lh_ring_message message;
    uint32_t done_count = 0;
    while (done_count < done_max && lh_ring_pop(&team->done, &message)) {
        done[done_count++] = (struct lh_io_request *)(uintptr_t)message.words[0];
        LH_ASSERT(done[done_count - 1]->result != -EINPROGRESS);
        lh_io_base_finish(&team->base);
    }
    return done_count;
}

static void team_free(struct threads *team)
{
    struct lh_alloc *alloc = team->base.alloc;
    lock(team);
    team->stopping = true;
    unlock(team);
    pthread_cond_broadcast(&team->has_work);
    for (uint32_t i = 0; i < team->thread_count; i++) {
        int rc = pthread_join(team->threads[i].id, NULL);
        LH_ASSERT(rc == 0);
    }
    pthread_cond_destroy(&team->has_work);
    pthread_mutex_destroy(&team->mutex);
    lh_ring_deinit(&team->done, alloc);
    lh_free(alloc, team->threads);
    lh_free(alloc, team);
}

static void threads_destroy(struct lh_io *io)
{
    LH_ASSERT(io->in_flight_count == 0);
    team_free((struct threads *)io);
}

static const struct lh_io_ops threads_ops = {
    .version = LH_IO_OPS_VERSION,
    .name = "threads",
    .submit = threads_submit,
    .poll = threads_poll,
    .destroy = threads_destroy,
};

/* Start threads until team has count of them. Returns 0 or -errno of lh_thread_start(). */
static int threads_start(struct threads *team, uint32_t count)
{
    int rc = 0;
    while (team->thread_count < count && rc == 0) {
        struct thread *thread = &team->threads[team->thread_count];
        *thread = (struct thread){.team = team, .index = team->thread_count};
        rc = lh_thread_start(&thread->id, NULL, thread_main, thread);
        if (rc == 0)
            team->thread_count++;
    }
    return rc;
}

int lh_io_threads_create(const struct lh_io_opts *opts, struct lh_alloc *alloc,
                         struct lh_io **io_out, struct lh_error *err)
{
    uint32_t count = opts->thread_count > 0 ? opts->thread_count : LH_IO_THREAD_COUNT_DEFAULT;
    LH_ASSERT(count <= LH_IO_THREAD_COUNT_MAX);
    *io_out = NULL;
    struct threads *team = lh_alloc_zeroed(alloc, 1, sizeof(*team));
    if (!team)
        return lh_error_set(err, -ENOMEM, "no memory for a team of %u I/O threads", count);
    lh_io_base_init(&team->base, &threads_ops, opts, alloc);
    int rc = -pthread_mutex_init(&team->mutex, NULL);
    LH_ASSERT(rc == 0);
    rc = -pthread_cond_init(&team->has_work, NULL);
    LH_ASSERT(rc == 0);
    team->threads = lh_alloc_zeroed(alloc, count, sizeof(*team->threads));
    if (!team->threads)
        rc = lh_error_set(err, -ENOMEM, "no memory for a team of %u I/O threads", count);
    if (rc == 0)
        rc = lh_ring_init(&team->done, alloc, opts->queue_depth_max, err);
    if (rc == 0) {
        rc = threads_start(team, count);
        if (rc < 0)
            lh_error_set(err, rc,
                         "only %u of %u I/O threads could be started: %s (see ulimit -u, -v)",
                         team->thread_count, count, strerror(-rc));
    }
    if (rc < 0) {
        team_free(team);
        return rc;
    }
    *io_out = &team->base.io;
    return 0;
}
