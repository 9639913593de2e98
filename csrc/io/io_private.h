/*
 * Code shared by the backends of csrc/io. Only the backends and tests include this file.
 *
 * A request's life is the same in each backend:
 *
 *      lh_io_base_take --> transfer --> lh_io_request_advance --true--> lh_io_base_finish
 *                              ^                  |
 *                              +------false-------+   a short transfer, EINTR, EAGAIN
 */
#ifndef LH_IO_IO_PRIVATE_H
#define LH_IO_IO_PRIVATE_H

#include "io/io.h"

/*
 * The largest transfer of one system call: io_uring's count has 32 bits, and no call transfers more
 * than 2 GiB minus a page.
 */
#define LH_IO_PIECE_BYTES_MAX LH_GIB
/* The number of consecutive retries without progress before the error becomes the result. */
#define LH_IO_RETRY_COUNT_MAX 32
#define LH_IO_THREAD_COUNT_DEFAULT 4

/* Every backend begins with this struct. */
struct lh_io_base {
    struct lh_io io;
    struct lh_alloc *alloc;
    struct lh_waker *waker;
    const struct lh_clock *clock;
    uint32_t queue_depth_max;
    uint32_t file_count;
    struct lh_io_file files[LH_IO_FILE_COUNT_MAX];
    uint64_t piece_bytes_max; /* LH_IO_PIECE_BYTES_MAX; smaller in a test */
};

/* Requests in the order of arrival, linked by next. */
struct lh_io_queue {
    struct lh_io_request *head;
    struct lh_io_request *tail;
};

void lh_io_base_init(struct lh_io_base *base, const struct lh_io_ops *ops,
                     const struct lh_io_opts *opts, struct lh_alloc *alloc);

/* Begin a request, or return -EAGAIN if the queue is full. Asserts the preconditions of io.h. */
int lh_io_base_take(struct lh_io_base *base, struct lh_io_request *request) LH_MUST_CHECK;

/* Decrement the number of requests in flight, for a request that poll is about to return. */
void lh_io_base_finish(struct lh_io_base *base);

/*
 * Process the kernel's answer: the bytes transferred, or -errno. Returns true if the request has
 * ended (result and completed_ns are set), false if the rest must be transferred
 * (lh_io_base_rest_bytes()).
 *
 * Thread: any; accesses only the request.
 */
bool lh_io_request_advance(const struct lh_io_base *base, struct lh_io_request *request,
                           int64_t answer) LH_MUST_CHECK;

/*
 * As lh_io_request_advance(), for a request that the kernel did not accept (code: -errno). Because
 * nothing has begun, EINTR and EAGAIN are retried for a SYNC, too.
 */
bool lh_io_request_refuse(const struct lh_io_base *base, struct lh_io_request *request, int code)
    LH_MUST_CHECK;

/* End a request with result. Thread: any. */
void lh_io_request_end(const struct lh_io_base *base, struct lh_io_request *request,
                       int64_t result);

/* The number of bytes of the next system call, which starts at request->done_bytes. */
uint64_t lh_io_base_rest_bytes(const struct lh_io_base *base, const struct lh_io_request *request);

static inline uint8_t *lh_io_request_rest(const struct lh_io_request *request)
{
    return (uint8_t *)request->buffer + request->done_bytes;
}

void lh_io_queue_push(struct lh_io_queue *queue, struct lh_io_request *request);
/* request must be in the queue (asserted). */
void lh_io_queue_remove(struct lh_io_queue *queue, struct lh_io_request *request);
/* Returns NULL if the queue is empty. */
struct lh_io_request *lh_io_queue_pop(struct lh_io_queue *queue);

/* Read the number in a file of /proc; fallback if it cannot be read. */
int64_t lh_io_proc_number(const char *path, int64_t fallback);

/* As lh_io_create(), with checked opts. */
typedef int (*lh_io_create_fn)(const struct lh_io_opts *opts, struct lh_alloc *alloc,
                               struct lh_io **io_out, struct lh_error *err);

int lh_io_uring_create(const struct lh_io_opts *opts, struct lh_alloc *alloc, struct lh_io **io_out,
                       struct lh_error *err) LH_MUST_CHECK;
int lh_io_aio_create(const struct lh_io_opts *opts, struct lh_alloc *alloc, struct lh_io **io_out,
                     struct lh_error *err) LH_MUST_CHECK;
/* with_helper: sync files on a helper thread, as on kernels without IOCB_CMD_FDSYNC. */
int lh_io_aio_create_sync(const struct lh_io_opts *opts, bool with_helper, struct lh_alloc *alloc,
                          struct lh_io **io_out, struct lh_error *err) LH_MUST_CHECK;
int lh_io_threads_create(const struct lh_io_opts *opts, struct lh_alloc *alloc,
                         struct lh_io **io_out, struct lh_error *err) LH_MUST_CHECK;

#endif
