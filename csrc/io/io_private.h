/*
 * What the backends of csrc/io share. Nobody else includes this, but for tests.
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
 * The most that one system call is asked for: a count of io_uring is 32 bits wide, and no call
 * moves more than 2 GiB minus a page.
 */
#define LH_IO_PIECE_BYTES_MAX LH_GIB
/* EINTR or EAGAIN in a row, without one byte moved, before it is the request's result. */
#define LH_IO_RETRY_COUNT_MAX 32
#define LH_IO_THREAD_COUNT_DEFAULT 4

/* First member of every backend. */
struct lh_io_base {
    struct lh_io io;
    struct lh_alloc *alloc;
    struct lh_waker *waker;
    const struct lh_clock *clock;
    uint32_t queue_depth_max;
    uint32_t file_count;
    struct lh_io_file files[LH_IO_FILE_COUNT_MAX];
    uint64_t piece_bytes_max; /* LH_IO_PIECE_BYTES_MAX; a test makes it small */
};

/* Requests in the order of arrival, linked by their next. */
struct lh_io_queue {
    struct lh_io_request *head;
    struct lh_io_request *tail;
};

void lh_io_base_init(struct lh_io_base *base, const struct lh_io_ops *ops,
                     const struct lh_io_opts *opts, struct lh_alloc *alloc);

/* Begin a request: 0, or -EAGAIN where queue_depth_max are in flight. Asserts what io.h demands. */
int lh_io_base_take(struct lh_io_base *base, struct lh_io_request *request) LH_MUST_CHECK;

/* Hand a request back: it leaves poll now. */
void lh_io_base_finish(struct lh_io_base *base);

/*
 * Digest what the kernel answered: bytes moved, or -errno. true: result and completed_ns are set.
 * false: transfer what is left, as lh_io_base_rest() tells.
 *
 * Thread: any; touches nothing but the request.
 */
bool lh_io_request_advance(const struct lh_io_base *base, struct lh_io_request *request,
                           int64_t answer) LH_MUST_CHECK;

/*
 * The kernel did not take the request: -errno. As lh_io_request_advance(), but nothing has begun,
 * so that EINTR and EAGAIN are tried again for a SYNC as well.
 */
bool lh_io_request_refuse(const struct lh_io_base *base, struct lh_io_request *request, int code)
    LH_MUST_CHECK;

/* End a request with result. Thread: any. */
void lh_io_request_end(const struct lh_io_base *base, struct lh_io_request *request,
                       int64_t result);

/* How much the next call transfers, from request->done_bytes on. */
uint64_t lh_io_base_rest_bytes(const struct lh_io_base *base, const struct lh_io_request *request);

static inline uint8_t *lh_io_request_rest(const struct lh_io_request *request)
{
    return (uint8_t *)request->buffer + request->done_bytes;
}

void lh_io_queue_push(struct lh_io_queue *queue, struct lh_io_request *request);
/* request is in the queue: asserted. */
void lh_io_queue_remove(struct lh_io_queue *queue, struct lh_io_request *request);
/* NULL: empty. */
struct lh_io_request *lh_io_queue_pop(struct lh_io_queue *queue);

/* The number in a file of /proc; fallback where it cannot be read. */
int64_t lh_io_proc_number(const char *path, int64_t fallback);

/* opts were checked; otherwise as lh_io_create. */
typedef int (*lh_io_create_fn)(const struct lh_io_opts *opts, struct lh_alloc *alloc,
                               struct lh_io **io_out, struct lh_error *err);

int lh_io_uring_create(const struct lh_io_opts *opts, struct lh_alloc *alloc, struct lh_io **io_out,
                       struct lh_error *err) LH_MUST_CHECK;
int lh_io_aio_create(const struct lh_io_opts *opts, struct lh_alloc *alloc, struct lh_io **io_out,
                     struct lh_error *err) LH_MUST_CHECK;
/* with_helper: files are synced by a helper thread, as on kernels that have no IOCB_CMD_FDSYNC. */
int lh_io_aio_create_sync(const struct lh_io_opts *opts, bool with_helper, struct lh_alloc *alloc,
                          struct lh_io **io_out, struct lh_error *err) LH_MUST_CHECK;
int lh_io_threads_create(const struct lh_io_opts *opts, struct lh_alloc *alloc,
                         struct lh_io **io_out, struct lh_error *err) LH_MUST_CHECK;

#endif
