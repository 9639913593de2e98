/*
 * libaio: the older asynchronous interface, for machines that forbid io_uring.
 *
 * libaio is asynchronous only with O_DIRECT: a buffered transfer completes inside io_submit(). Even
 * with O_DIRECT, io_submit() may block if the device's queue is full or the file system has to read
 * metadata. This is acceptable for the engine, whose other work would wait for I/O, too.
 *
 *      submit --> todo --[flush: io_submit]--> the kernel --[poll: io_getevents]--> the owner
 *                   |                              | refused for good: io_destroy waits for them
 *                   \----- refused by io_submit ---+--> failed ------------------------^
 *
 * Kernels before 4.18 cannot sync files with libaio. A helper, the threads backend with one thread,
 * then executes the SYNC requests, which count as in flight in this backend as well.
 */
#if defined(LH_HAVE_LIBAIO)
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* memfd_create */
#endif
#include "io/io_private.h"

#include <inttypes.h>
#include <libaio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"

#define BATCH_COUNT_MAX 64

struct aio {
    struct lh_io_base base; /* must be first: callers have a pointer to it */
    io_context_t context;
    struct lh_io_queue todo;
    struct lh_io_queue failed;
    struct lh_io_queue inside; /* requests that the kernel has accepted */
    int refusal;               /* the error of io_getevents(), which has ended the context; or 0 */
    struct lh_io *helper;      /* executes SYNC requests; NULL: the kernel executes them */
};

static void control_prepare(const struct aio *aio, struct iocb *control,
                            struct lh_io_request *request)
{
    int fd = aio->base.files[request->file_index].fd;
    if (request->kind == LH_IO_KIND_SYNC) {
        io_prep_fdsync(control, fd);
    } else {
        uint8_t *buffer = lh_io_request_rest(request);
        size_t bytes = (size_t)lh_io_base_rest_bytes(&aio->base, request);
        long long offset = (long long)request->offset + (long long)request->done_bytes;
        if (request->kind == LH_IO_KIND_READ)
            io_prep_pread(control, fd, buffer, bytes, offset);
        else
            io_prep_pwrite(control, fd, buffer, bytes, offset);
    }
    control->data = request;
    if (aio->base.waker)
        io_set_eventfd(control, aio->base.waker->fd);
}

/* Handle the first request of todo, which the kernel rejected with rc. */
static void first_refused(struct aio *aio, int rc)
{
    if (!lh_io_request_refuse(&aio->base, aio->todo.head, rc))
        return;
    lh_io_queue_push(&aio->failed, lh_io_queue_pop(&aio->todo));
    if (aio->base.waker)
        lh_waker_wake(aio->base.waker);
}

static void all_fail(struct aio *aio, struct lh_io_queue *queue)
{
    struct lh_io_request *request = NULL;
    LH_ASSERT(aio->refusal < 0);
    while ((request = lh_io_queue_pop(queue)) != NULL) {
        lh_io_request_end(&aio->base, request, aio->refusal);
        lh_io_queue_push(&aio->failed, request);
    }
    if (aio->failed.head && aio->base.waker)
        lh_waker_wake(aio->base.waker);
}

/*
 * Handle that the kernel refuses io_getevents() itself, as a seccomp filter may do at any time.
 * io_destroy() waits until the kernel no longer accesses the buffers of the requests that it has
 * accepted. The results of these requests are unknown.
 */
static void getevents_refused(struct aio *aio, int rc)
{
    LH_ASSERT(rc < 0 && aio->refusal == 0);
    aio->refusal = rc;
    io_destroy(aio->context);
    aio->context = NULL;
    all_fail(aio, &aio->inside);
}

static void aio_flush(struct lh_io *io)
{
    struct aio *aio = (struct aio *)io;
    if (aio->refusal < 0)
        all_fail(aio, &aio->todo);
    while (aio->todo.head) {
        struct iocb controls[BATCH_COUNT_MAX];
        struct iocb *batch[BATCH_COUNT_MAX];
        long count = 0;
        for (struct lh_io_request *request = aio->todo.head; request && count < BATCH_COUNT_MAX;
             request = request->next) {
            control_prepare(aio, &controls[count], request);
            batch[count] = &controls[count];
            count++;
        }
        int rc = io_submit(aio->context, count, batch); /* copies the control blocks */
        LH_ASSERT(rc <= count);
        for (int i = 0; i < rc; i++)
            lh_io_queue_push(&aio->inside, lh_io_queue_pop(&aio->todo));
        /* The kernel has no room now: the poll after the next completion retries. If nothing is in
         * the kernel, there will be no such completion. */
        if (rc == -EAGAIN && aio->inside.head)
            return;
        /* 0: a seccomp filter fakes success, and nothing was accepted. */
        if (rc <= 0)
            first_refused(aio, rc == 0 ? -EIO : rc);
    }
}

static int aio_submit(struct lh_io *io, struct lh_io_request *request)
{
    struct aio *aio = (struct aio *)io;
    LH_TRY(lh_io_base_take(&aio->base, request));
    if (aio->helper && request->kind == LH_IO_KIND_SYNC) {
        int rc = aio->helper->ops->submit(aio->helper, request);
        LH_ASSERT(rc == 0); /* the helper's queue is as deep as this one */
        return 0;
    }
    lh_io_queue_push(&aio->todo, request);
    return 0;
}

/* Collect the kernel's completions: put finished requests into done, short transfers into todo. */
static uint32_t events_take(struct aio *aio, struct lh_io_request **done, uint32_t done_max)
{
    struct io_event events[BATCH_COUNT_MAX];
    uint32_t done_count = 0;
    while (done_count < done_max && aio->inside.head) {
        struct timespec now = {0};
        long event_max = (long)lh_min_u64(done_max - done_count, BATCH_COUNT_MAX);
        int rc = io_getevents(aio->context, 0, event_max, events, &now);
        if (rc == 0 || rc == -EINTR)
            break;
        if (rc < 0) {
            getevents_refused(aio, rc);
            break;
        }
        for (int i = 0; i < rc; i++) {
            struct lh_io_request *request = events[i].data;
            lh_io_queue_remove(&aio->inside, request);
            if (lh_io_request_advance(&aio->base, request, (long)events[i].res))
                done[done_count++] = request;
            else
                lh_io_queue_push(&aio->todo, request);
        }
    }
    return done_count;
}

static uint32_t aio_poll(struct lh_io *io, struct lh_io_request **done, uint32_t done_max)
{
    struct aio *aio = (struct aio *)io;
    uint32_t done_count = events_take(aio, done, done_max);
    aio_flush(io);
    while (done_count < done_max && aio->failed.head)
        done[done_count++] = lh_io_queue_pop(&aio->failed);
    if (aio->helper)
        done_count += aio->helper->ops->poll(aio->helper, done + done_count, done_max - done_count);
    for (uint32_t i = 0; i < done_count; i++)
        lh_io_base_finish(&aio->base);
    return done_count;
}

static void aio_free(struct aio *aio)
{
    if (aio->helper)
        aio->helper->ops->destroy(aio->helper);
    if (aio->context)
        io_destroy(aio->context);
    lh_free(aio->base.alloc, aio);
}

static void aio_destroy(struct lh_io *io)
{
    LH_ASSERT(io->in_flight_count == 0);
    aio_free((struct aio *)io);
}

static const struct lh_io_ops aio_ops = {
    .version = LH_IO_OPS_VERSION,
    .name = "libaio",
    .submit = aio_submit,
    .flush = aio_flush,
    .poll = aio_poll,
    .destroy = aio_destroy,
};

static int setup_refused(int rc, uint32_t depth, struct lh_error *err)
{
    if (rc == -EAGAIN)
        return lh_error_set(err, rc,
                            "io_setup: %u events do not fit under sysctl fs.aio-max-nr=%" PRId64
                            ", of which %" PRId64 " are taken; raise it with: "
                            "sysctl -w fs.aio-max-nr=1048576",
                            depth, lh_io_proc_number("/proc/sys/fs/aio-max-nr", -1),
                            lh_io_proc_number("/proc/sys/fs/aio-nr", -1));
    if (rc == -ENOSYS || rc == -EPERM)
        return lh_error_set(err, rc,
                            "io_setup: %s: the kernel is built without CONFIG_AIO, or a seccomp "
                            "filter forbids it (docker: --security-opt seccomp=unconfined)",
                            strerror(-rc));
    return lh_error_set(err, rc, "io_setup for %u events: %s", depth, strerror(-rc));
}

/*
 * Whether the kernel can sync files through context, tested on a file in memory: 0 or 1, or -errno
 * if it refuses io_getevents().
 */
static int kernel_has_sync(io_context_t context)
{
    int fd = memfd_create("lohan-probe", MFD_CLOEXEC);
    if (fd < 0)
        return 0;
    struct iocb control;
    struct iocb *batch = &control;
    struct io_event event = {0};
    io_prep_fdsync(&control, fd);
    int rc = io_submit(context, 1, &batch);
    if (rc == 1) {
        rc = -EINTR;
        while (rc == -EINTR)
            rc = io_getevents(context, 1, 1, &event, NULL);
        if (rc == 0) /* it did not wait: a seccomp filter fakes success */
            rc = -EIO;
        if (rc > 0)
            rc = event.res == 0 ? 1 : 0;
    } else {
        rc = 0;
    }
    close(fd);
    return rc;
}

int lh_io_aio_create_sync(const struct lh_io_opts *opts, bool with_helper, struct lh_alloc *alloc,
                          struct lh_io **io_out, struct lh_error *err)
{
    *io_out = NULL;
    struct aio *aio = lh_alloc_zeroed(alloc, 1, sizeof(*aio));
    if (!aio)
        return lh_error_set(err, -ENOMEM, "no memory for libaio");
    lh_io_base_init(&aio->base, &aio_ops, opts, alloc);
    int rc = io_setup((int)opts->queue_depth_max, &aio->context);
    if (rc < 0) {
        aio->context = NULL;
        setup_refused(rc, opts->queue_depth_max, err);
        aio_free(aio);
        return rc;
    }
    int has_sync = with_helper ? 0 : kernel_has_sync(aio->context);
    if (has_sync < 0) {
        rc = lh_error_set(err, has_sync,
                          "io_getevents: %s: a seccomp filter allows io_setup and forbids it "
                          "(docker: --security-opt seccomp=unconfined)",
                          strerror(-has_sync));
    } else if (has_sync == 0) {
        struct lh_io_opts helper_opts = *opts;
        helper_opts.thread_count = 1;
        rc = lh_io_threads_create(&helper_opts, alloc, &aio->helper, err);
    }
    if (rc < 0) {
        aio_free(aio);
        return rc;
    }
    *io_out = &aio->base.io;
    return 0;
}

int lh_io_aio_create(const struct lh_io_opts *opts, struct lh_alloc *alloc, struct lh_io **io_out,
                     struct lh_error *err)
{
    return lh_io_aio_create_sync(opts, false, alloc, io_out, err);
}
#endif
