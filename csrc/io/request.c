#include "io/io_private.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"

void lh_io_base_init(struct lh_io_base *base, const struct lh_io_ops *ops,
                     const struct lh_io_opts *opts, struct lh_alloc *alloc)
{
    LH_ASSERT(opts->file_count >= 1 && opts->file_count <= LH_IO_FILE_COUNT_MAX);
    LH_ASSERT(opts->queue_depth_max >= 1 && opts->queue_depth_max <= LH_IO_QUEUE_DEPTH_MAX);
    LH_ASSERT(opts->clock);
    base->io = (struct lh_io){.ops = ops};
    base->alloc = alloc;
    base->waker = opts->waker;
    base->clock = opts->clock;
    base->queue_depth_max = opts->queue_depth_max;
    base->file_count = opts->file_count;
    memcpy(base->files, opts->files, opts->file_count * sizeof(*opts->files));
    base->piece_bytes_max = LH_IO_PIECE_BYTES_MAX;
}

int lh_io_base_take(struct lh_io_base *base, struct lh_io_request *request)
{
    LH_ASSERT(request->file_index < base->file_count);
    LH_ASSERT(request->kind <= LH_IO_KIND_SYNC);
    if (request->kind != LH_IO_KIND_SYNC) {
        LH_ASSERT(request->buffer && request->bytes > 0);
        LH_ASSERT(request->least_bytes <= request->bytes);
        LH_ASSERT(request->least_bytes == 0 || request->kind == LH_IO_KIND_READ);
        if (base->files[request->file_index].direct) {
            LH_ASSERT(lh_is_aligned(request->offset, LH_BLOCK_BYTES));
            LH_ASSERT(lh_is_aligned(request->bytes, LH_BLOCK_BYTES));
            LH_ASSERT(lh_is_aligned((uintptr_t)request->buffer, LH_BLOCK_BYTES));
        }
    }
    LH_ASSERT(base->io.in_flight_count <= base->queue_depth_max);
    if (base->io.in_flight_count == base->queue_depth_max)
        return -EAGAIN;
    base->io.in_flight_count++;
    request->result = -EINPROGRESS;
    request->done_bytes = 0;
    request->retry_count = 0;
    request->next = NULL;
    request->submitted_ns = lh_clock_now_ns(base->clock);
    return 0;
}

void lh_io_base_finish(struct lh_io_base *base)
{
    LH_ASSERT(base->io.in_flight_count > 0);
    base->io.in_flight_count--;
}

void lh_io_request_end(const struct lh_io_base *base, struct lh_io_request *request, int64_t result)
{
    LH_ASSERT(result <= 0);
    request->result = result;
    request->completed_ns = lh_clock_now_ns(base->clock);
}

/* Handle an attempt without progress. Returns false: try again; true: the request has ended. */
static bool retry(const struct lh_io_base *base, struct lh_io_request *request, int64_t result)
{
    LH_ASSERT(request->retry_count <= LH_IO_RETRY_COUNT_MAX);
    if (request->retry_count == LH_IO_RETRY_COUNT_MAX) {
        lh_io_request_end(base, request, result);
        return true;
    }
    request->retry_count++;
    return false;
}

static uint64_t enough_bytes(const struct lh_io_request *request)
{
    LH_ASSERT(request->least_bytes <= request->bytes);
    return request->least_bytes > 0 ? request->least_bytes : request->bytes;
}

bool lh_io_request_advance(const struct lh_io_base *base, struct lh_io_request *request,
                           int64_t answer)
{
    bool is_sync = request->kind == LH_IO_KIND_SYNC;
    LH_ASSERT(request->file_index < base->file_count);
    /* A failed sync may have dropped the data it covered, so that a retry would return 0. */
    if (!is_sync && (answer == -EINTR || answer == -EAGAIN))
        return retry(base, request, answer);
    if (answer < 0 || is_sync) {
        lh_io_request_end(base, request, answer < 0 ? answer : 0);
        return true;
    }
    bool is_read = request->kind == LH_IO_KIND_READ;
    if (answer == 0) {
        lh_io_request_end(base, request, is_read ? -ENODATA : -EIO);
        return true;
    }
    uint64_t before_bytes = request->done_bytes;
    LH_ASSERT((uint64_t)answer <= request->bytes - before_bytes);
    request->done_bytes += (uint64_t)answer;
    if (request->done_bytes >= enough_bytes(request)) {
        lh_io_request_end(base, request, 0);
        return true;
    }
    if (base->files[request->file_index].direct) {
        uint64_t torn_bytes = request->done_bytes % LH_BLOCK_BYTES;
        if (torn_bytes > 0 && is_read) {
            /* Only the end of the file ends a direct read inside a block. */
            lh_io_request_end(base, request, -ENODATA);
            return true;
        }
        /* Write the partial block again: direct transfers begin at block boundaries. */
        request->done_bytes -= torn_bytes;
        LH_ASSERT(request->done_bytes >= before_bytes);
        if (request->done_bytes == before_bytes)
            return retry(base, request, -EIO);
    }
    request->retry_count = 0;
    return false;
}

bool lh_io_request_refuse(const struct lh_io_base *base, struct lh_io_request *request, int code)
{
    LH_ASSERT(code < 0);
    if (code == -EINTR || code == -EAGAIN)
        return retry(base, request, code);
    lh_io_request_end(base, request, code);
    return true;
}

uint64_t lh_io_base_rest_bytes(const struct lh_io_base *base, const struct lh_io_request *request)
{
    LH_ASSERT(request->done_bytes < request->bytes);
    LH_ASSERT(base->piece_bytes_max > 0);
    return lh_min_u64(request->bytes - request->done_bytes, base->piece_bytes_max);
}

void lh_io_queue_push(struct lh_io_queue *queue, struct lh_io_request *request)
{
    LH_ASSERT((queue->head == NULL) == (queue->tail == NULL));
    request->next = NULL;
    if (queue->tail)
        queue->tail->next = request;
    else
        queue->head = request;
    queue->tail = request;
}

struct lh_io_request *lh_io_queue_pop(struct lh_io_queue *queue)
{
    struct lh_io_request *request = queue->head;
    if (!request)
        return NULL;
    queue->head = request->next;
    LH_ASSERT(queue->head || queue->tail == request);
    if (!queue->head)
        queue->tail = NULL;
    request->next = NULL;
    return request;
}

void lh_io_queue_remove(struct lh_io_queue *queue, struct lh_io_request *request)
{
    struct lh_io_request *before = NULL;
    struct lh_io_request *at = queue->head;
    while (at && at != request) {
        before = at;
        at = at->next;
    }
    LH_ASSERT(at);
    if (before)
        before->next = request->next;
    else
        queue->head = request->next;
    if (queue->tail == request)
        queue->tail = before;
    request->next = NULL;
}

int64_t lh_io_proc_number(const char *path, int64_t fallback)
{
    char text[32] = {0};
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return fallback;
    ssize_t got = read(fd, text, sizeof(text) - 1);
    close(fd);
    char *end = text;
    long long value = got > 0 ? strtoll(text, &end, 10) : 0;
    return end == text ? fallback : value;
}
