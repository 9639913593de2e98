/*
 * The io_uring backend. The kernel and the owner share two rings, and one system call submits a
 * whole batch.
 *
 * [Note: How a sleeping owner learns of completions]
 * The ring's eventfd is the waker's. A direct transfer ends in an interrupt, and its completion is
 * posted by task work of the submitting thread, which runs when that thread is in the kernel. An
 * owner that sleeps in poll() is woken to run the task work, which writes the eventfd; poll() then
 * restarts and finds it readable. So COOP_TASKRUN does not delay a sleeping owner, and it does not
 * interrupt a computing one. TASKRUN_FLAG makes io_uring_peek_cqe() enter the kernel when task
 * work is pending, so an owner that never sleeps sees completions, too.
 *
 * DEFER_TASKRUN and SINGLE_ISSUER are not used: they bind the ring to the thread that created it,
 * but the program creates the ring and the engine's thread uses it. Their savings are negligible
 * compared with transfers of megabytes.
 *
 * [Note: Registered buffers]
 * The kernel pins and maps a registered buffer once, instead of for each transfer. It accepts at
 * most 1 GiB in one piece, so a region is registered as consecutive pieces; a transfer that crosses
 * from one piece to the next is an ordinary one. If registration fails, transfers are only slower,
 * so the failure is recorded in note.
 */
#if defined(LH_HAVE_LIBURING)
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* liburing.h's cpu_set_t */
#endif
#include "io/io_private.h"

#include <inttypes.h>
#include <liburing.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "base/assert.h"

#define REGISTERED_BYTES_MAX LH_GIB
#define REGISTERED_COUNT_MAX 16384 /* IORING_MAX_REG_BUFFERS of the kernel */
#define RETRY_DELAY_NS 1000000
#define PIECE_NONE UINT32_MAX

struct region {
    uint8_t *base;
    uint64_t bytes;
    uint32_t piece_first;
};

struct uring {
    struct lh_io_base base; /* must be first: callers have a pointer to it */
    struct io_uring ring;
    struct region regions[LH_IO_BUFFER_COUNT_MAX];
    uint32_t region_count;       /* the number of registered regions */
    bool has_files;              /* the files are registered */
    bool has_eventfd;            /* the waker's eventfd is registered */
    struct lh_io_queue prepared; /* requests in the ring, not yet accepted by the kernel */
    struct lh_io_queue failed;   /* requests that have ended and wait to be polled */
    int refusal;                 /* the error of io_uring_enter(), which ended submission; or 0 */
};

/* The registered piece that holds all of [begin, begin + bytes), or PIECE_NONE. */
static uint32_t piece_of(const struct uring *uring, const uint8_t *begin, uint64_t bytes)
{
    LH_ASSERT(bytes > 0);
    for (uint32_t i = 0; i < uring->region_count; i++) {
        const struct region *region = &uring->regions[i];
        if (begin < region->base || begin >= region->base + region->bytes)
            continue;
        uint64_t offset = (uint64_t)(begin - region->base);
        uint64_t piece = offset / REGISTERED_BYTES_MAX;
        if (bytes > region->bytes - offset || (offset + bytes - 1) / REGISTERED_BYTES_MAX != piece)
            return PIECE_NONE;
        return region->piece_first + (uint32_t)piece;
    }
    return PIECE_NONE;
}

static void request_fail(struct uring *uring, struct lh_io_request *request)
{
    LH_ASSERT(uring->refusal < 0);
    lh_io_request_end(&uring->base, request, uring->refusal);
    lh_io_queue_push(&uring->failed, request);
    if (uring->base.waker)
        lh_waker_wake(uring->base.waker);
}

/* Prepare an entry in the ring for the rest of request. */
static void request_prepare(struct uring *uring, struct lh_io_request *request)
{
    if (uring->refusal < 0) {
        request_fail(uring, request);
        return;
    }
    struct io_uring_sqe *sqe = io_uring_get_sqe(&uring->ring);
    LH_ASSERT(sqe); /* the ring has queue_depth_max entries; a request uses at most one */
    int file = (int)request->file_index;
    if (request->kind == LH_IO_KIND_SYNC) {
        io_uring_prep_fsync(sqe, file, IORING_FSYNC_DATASYNC);
    } else {
        uint8_t *buffer = lh_io_request_rest(request);
        uint32_t bytes = (uint32_t)lh_io_base_rest_bytes(&uring->base, request);
        uint64_t offset = request->offset + request->done_bytes;
        uint32_t piece = piece_of(uring, buffer, bytes);
        bool is_read = request->kind == LH_IO_KIND_READ;
        if (piece != PIECE_NONE && is_read)
            io_uring_prep_read_fixed(sqe, file, buffer, bytes, offset, (int)piece);
        else if (piece != PIECE_NONE)
            io_uring_prep_write_fixed(sqe, file, buffer, bytes, offset, (int)piece);
        else if (is_read)
            io_uring_prep_read(sqe, file, buffer, bytes, offset);
        else
            io_uring_prep_write(sqe, file, buffer, bytes, offset);
    }
    io_uring_sqe_set_data(sqe, request);
    /* A retry runs on a kernel thread that may block, so that the owner does not spin on EAGAIN. */
    unsigned flags = IOSQE_FIXED_FILE | (request->retry_count > 0 ? IOSQE_ASYNC : 0);
    io_uring_sqe_set_flags(sqe, flags);
    lh_io_queue_push(&uring->prepared, request);
}

static int uring_submit(struct lh_io *io, struct lh_io_request *request)
{
    struct uring *uring = (struct uring *)io;
    LH_TRY(lh_io_base_take(&uring->base, request));
    request_prepare(uring, request);
    return 0;
}

/*
 * Handle that the kernel refuses io_uring_enter() itself, as a seccomp filter may do at any time.
 * Requests that it has accepted still complete. Prepared requests fail; their entries stay in the
 * ring, which is never submitted again.
 */
static void enter_refused(struct uring *uring, int rc)
{
    struct lh_io_request *request = NULL;
    uring->refusal = rc;
    while ((request = lh_io_queue_pop(&uring->prepared)) != NULL)
        request_fail(uring, request);
}

static void uring_flush(struct lh_io *io)
{
    struct uring *uring = (struct uring *)io;
    unsigned waiting_count = 0;
    while (uring->refusal == 0 && (waiting_count = io_uring_sq_ready(&uring->ring)) > 0) {
        int rc = io_uring_submit(&uring->ring);
        for (int i = 0; i < rc; i++)
            lh_io_queue_pop(&uring->prepared);
        if (rc > 0 || rc == -EINTR)
            continue;
        if (rc != -EAGAIN && rc != -EBUSY && rc != -ENOMEM) {
            /* 0: a seccomp filter fakes success, and nothing was accepted. */
            enter_refused(uring, rc == 0 ? -EIO : rc);
            return;
        }
        /* The kernel is short of memory or has completions to deliver: the next poll retries. If
         * no completion will wake the owner to do so, the owner must not sleep. */
        if (waiting_count == io->in_flight_count) {
            struct timespec delay = {.tv_nsec = RETRY_DELAY_NS};
            nanosleep(&delay, NULL);
            if (uring->base.waker)
                lh_waker_wake(uring->base.waker);
        }
        return;
    }
}

static uint32_t uring_poll(struct lh_io *io, struct lh_io_request **done, uint32_t done_max)
{
    struct uring *uring = (struct uring *)io;
    struct io_uring_cqe *cqe = NULL;
    uint32_t done_count = 0;
    while (done_count < done_max && io_uring_peek_cqe(&uring->ring, &cqe) == 0) {
        struct lh_io_request *request = io_uring_cqe_get_data(cqe);
        int64_t answer = cqe->res;
        io_uring_cqe_seen(&uring->ring, cqe);
        if (lh_io_request_advance(&uring->base, request, answer)) {
            done[done_count++] = request;
            lh_io_base_finish(&uring->base);
        } else {
            request_prepare(uring, request);
        }
    }
    uring_flush(io);
    while (done_count < done_max && uring->failed.head) {
        done[done_count++] = lh_io_queue_pop(&uring->failed);
        lh_io_base_finish(&uring->base);
    }
    return done_count;
}

/*
 * Undo each registration explicitly: a kernel thread frees the ring asynchronously, so files (with
 * their locks) and locked memory would otherwise be released only some time after destroy.
 */
static void uring_free(struct uring *uring)
{
    if (uring->region_count > 0)
        io_uring_unregister_buffers(&uring->ring);
    if (uring->has_files)
        io_uring_unregister_files(&uring->ring);
    if (uring->has_eventfd)
        io_uring_unregister_eventfd(&uring->ring);
    io_uring_queue_exit(&uring->ring);
    lh_free(uring->base.alloc, uring);
}

static void uring_destroy(struct lh_io *io)
{
    LH_ASSERT(io->in_flight_count == 0);
    uring_free((struct uring *)io);
}

static const struct lh_io_ops uring_ops = {
    .version = LH_IO_OPS_VERSION,
    .name = "io_uring",
    .submit = uring_submit,
    .flush = uring_flush,
    .poll = uring_poll,
    .destroy = uring_destroy,
};

/* Report what forbids io_uring, and how to allow it. */
static int setup_refused(int rc, struct lh_error *err)
{
    int64_t disabled = lh_io_proc_number("/proc/sys/kernel/io_uring_disabled", 0);
    bool is_forbidden = rc == -EPERM || rc == -EACCES;
    if (is_forbidden && disabled == 1)
        return lh_error_set(err, rc,
                            "sysctl kernel.io_uring_disabled=1 restricts io_uring to the group of "
                            "kernel.io_uring_group; join that group, or run: "
                            "sysctl -w kernel.io_uring_disabled=0");
    if (is_forbidden && disabled > 1)
        return lh_error_set(err, rc,
                            "sysctl kernel.io_uring_disabled=%" PRId64 " forbids io_uring; allow "
                            "it with: sysctl -w kernel.io_uring_disabled=0",
                            disabled);
    if (is_forbidden)
        return lh_error_set(err, rc,
                            "io_uring_setup is forbidden (%s), by a container's seccomp filter or "
                            "a security module; for docker: --security-opt seccomp=unconfined, or "
                            "a profile that allows io_uring_setup, io_uring_enter and "
                            "io_uring_register",
                            strerror(-rc));
    if (rc == -ENOSYS)
        return lh_error_set(err, rc,
                            "this kernel has no io_uring (older than 5.1, or built without "
                            "CONFIG_IO_URING), or a seccomp filter hides it (docker: "
                            "--security-opt seccomp=unconfined)");
    if (rc == -ENOMEM)
        return lh_error_set(err, rc,
                            "the kernel has no memory for an io_uring; before Linux 5.12 its rings "
                            "count against ulimit -l");
    return lh_error_set(err, rc, "io_uring_setup: %s", strerror(-rc));
}

static int ring_setup(struct uring *uring, uint32_t depth, struct lh_error *err)
{
    int rc = -EINVAL;
#if defined(IORING_SETUP_COOP_TASKRUN) && defined(IORING_SETUP_TASKRUN_FLAG)
    /* See [Note: How a sleeping owner learns of completions]. Kernels before 5.19 return EINVAL. */
    unsigned flags = IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
    rc = io_uring_queue_init(depth, &uring->ring, flags);
#endif
    if (rc == -EINVAL)
        rc = io_uring_queue_init(depth, &uring->ring, 0);
    return rc < 0 ? setup_refused(rc, err) : 0;
}

static void buffers_refused(struct uring *uring, int rc, uint64_t total_bytes)
{
    char *note = uring->base.io.note;
    uint64_t note_bytes = sizeof(uring->base.io.note);
    struct rlimit limit = {.rlim_cur = RLIM_INFINITY};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (rc == -ENOMEM && limit.rlim_cur != RLIM_INFINITY)
        snprintf(note, note_bytes,
                 "buffers not registered: RLIMIT_MEMLOCK is %" PRIu64 " bytes, %" PRIu64
                 " would be needed; raise with ulimit -l or /etc/security/limits.conf",
                 (uint64_t)limit.rlim_cur, total_bytes);
    else
        snprintf(note, note_bytes, "buffers not registered: %" PRIu64 " bytes: %s", total_bytes,
                 strerror(-rc));
}

/* Register all regions, or none and add a note. -ENOMEM: there is no memory for lohan's table. */
static int buffers_register(struct uring *uring, const struct lh_io_opts *opts,
                            struct lh_error *err)
{
    uint64_t piece_count = 0;
    uint64_t total_bytes = 0;
    for (uint32_t i = 0; i < opts->buffer_count; i++) {
        piece_count += lh_div_ceil(opts->buffers[i].bytes, REGISTERED_BYTES_MAX);
        total_bytes += opts->buffers[i].bytes;
    }
    if (piece_count == 0)
        return 0;
    if (piece_count > REGISTERED_COUNT_MAX) {
        buffers_refused(uring, -E2BIG, total_bytes);
        return 0;
    }
    struct iovec *pieces = lh_alloc_zeroed(uring->base.alloc, piece_count, sizeof(*pieces));
    if (!pieces)
        return lh_error_set(err, -ENOMEM, "no memory for a table of %" PRIu64 " buffers",
                            piece_count);
    uint32_t piece = 0;
    for (uint32_t i = 0; i < opts->buffer_count; i++) {
        uint8_t *base = opts->buffers[i].base;
        uint64_t bytes = opts->buffers[i].bytes;
        uring->regions[i] = (struct region){base, bytes, piece};
        for (uint64_t offset = 0; offset < bytes; offset += REGISTERED_BYTES_MAX)
            pieces[piece++] = (struct iovec){
                .iov_base = base + offset,
                .iov_len = (size_t)lh_min_u64(bytes - offset, REGISTERED_BYTES_MAX),
            };
    }
    LH_ASSERT(piece == piece_count);
    int rc = io_uring_register_buffers(&uring->ring, pieces, piece);
    lh_free(uring->base.alloc, pieces);
    if (rc < 0)
        buffers_refused(uring, rc, total_bytes);
    else
        uring->region_count = opts->buffer_count;
    return 0;
}

static int files_register(struct uring *uring, struct lh_error *err)
{
    int fds[LH_IO_FILE_COUNT_MAX];
    for (uint32_t i = 0; i < uring->base.file_count; i++)
        fds[i] = uring->base.files[i].fd;
    int rc = io_uring_register_files(&uring->ring, fds, uring->base.file_count);
    if (rc < 0)
        return lh_error_set(err, rc, "io_uring: the kernel refused to register %u files: %s",
                            uring->base.file_count, strerror(-rc));
    uring->has_files = true;
    return 0;
}

static int eventfd_register(struct uring *uring, struct lh_error *err)
{
    if (!uring->base.waker)
        return 0;
    int rc = io_uring_register_eventfd(&uring->ring, uring->base.waker->fd);
    if (rc < 0)
        return lh_error_set(err, rc, "io_uring: the kernel refused an eventfd: %s", strerror(-rc));
    uring->has_eventfd = true;
    return 0;
}

int lh_io_uring_create(const struct lh_io_opts *opts, struct lh_alloc *alloc, struct lh_io **io_out,
                       struct lh_error *err)
{
    *io_out = NULL;
    struct uring *uring = lh_alloc_zeroed(alloc, 1, sizeof(*uring));
    if (!uring)
        return lh_error_set(err, -ENOMEM, "no memory for an io_uring");
    lh_io_base_init(&uring->base, &uring_ops, opts, alloc);
    int rc = ring_setup(uring, opts->queue_depth_max, err);
    if (rc < 0) {
        lh_free(alloc, uring);
        return rc;
    }
    rc = files_register(uring, err);
    if (rc == 0)
        rc = eventfd_register(uring, err);
    if (rc == 0)
        rc = buffers_register(uring, opts, err);
    if (rc < 0) {
        uring_free(uring);
        return rc;
    }
    *io_out = &uring->base.io;
    return 0;
}
#endif
