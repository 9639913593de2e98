/*
 * Asynchronous file I/O for one owner thread: io_uring, libaio or threads behind one vtable.
 *
 * A request is a struct in its owner's memory. Submit hands it over; poll returns it with
 * result = 0 or -errno. The backend automatically continues short transfers and retries EINTR and
 * EAGAIN, so result 0 means that all bytes (READ: least_bytes) were transferred. A SYNC that the
 * kernel accepted is never retried: a second one could succeed because the first one has dropped
 * what it could not write. If the kernel refuses the backend's system call itself (a seccomp
 * filter), every request that the kernel has not accepted, and every later one, fails with that
 * error. A read that reaches the end of the file fails with -ENODATA unless at least least_bytes of
 * it have arrived; this allows reading the last, partial block of a file with O_DIRECT. Backends
 * never access the bytes themselves. A request on a file whose fd is -1 fails with -EBADF.
 *
 * The owner's loop, which misses no completion while it sleeps:
 *
 *      submit ... submit, flush
 *      lh_waker_prepare; poll until it returns 0; no request ? lh_waker_wait : lh_waker_cancel
 *
 * Invariants:
 *  1. Every submitted request is returned exactly once, through poll, on the owner thread.
 *  2. At most queue_depth_max requests are in flight; another submit returns -EAGAIN and leaves the
 *     request with its owner.
 *  3. With O_DIRECT (file.direct) offset, bytes and buffer are multiples of LH_BLOCK_BYTES:
 *     asserted at submit.
 *
 * Thread: one owner calls create, submit, flush, poll and destroy. Another thread may become the
 *         owner while nothing is in flight.
 */
#ifndef LH_IO_IO_H
#define LH_IO_IO_H

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/waker.h"

#define LH_IO_OPS_VERSION 1
#define LH_IO_QUEUE_DEPTH_MAX 1024
#define LH_IO_FILE_COUNT_MAX 256
#define LH_IO_BUFFER_COUNT_MAX 64
#define LH_IO_THREAD_COUNT_MAX 64

enum lh_io_kind {
    LH_IO_KIND_READ = 0,
    LH_IO_KIND_WRITE = 1,
    /* fdatasync: completes when the file's data and the metadata needed to read it are durable */
    LH_IO_KIND_SYNC = 2,
};

struct lh_io_request {
    enum lh_io_kind kind;
    uint32_t file_index;  /* index into the files given at create */
    void *buffer;         /* borrowed until the request is returned; ignored by SYNC */
    uint64_t bytes;       /* above 0; ignored by SYNC */
    uint64_t offset;      /* offset in the file; ignored by SYNC */
    uint64_t least_bytes; /* READ: succeed once this many bytes have arrived; 0: all */
    void *owner;          /* for the submitter; backends never read it */
    int64_t result;       /* 0 or -errno; valid when poll has returned the request */
    uint64_t submitted_ns;
    uint64_t completed_ns;
    /* Private to the backend. */
    uint64_t done_bytes;
    struct lh_io_request *next;
    uint32_t retry_count;
};

struct lh_io_file {
    int fd;      /* borrowed until destroy; -1: not open */
    bool direct; /* opened with O_DIRECT */
};

/*
 * A region that contains buffers of requests. A backend may register it with the kernel.
 */
struct lh_io_buffer {
    void *base;
    uint64_t bytes;
};

struct lh_io_opts {
    const struct lh_io_file *files; /* borrowed for the call */
    uint32_t file_count;
    const struct lh_io_buffer *buffers; /* borrowed for the call */
    uint32_t buffer_count;
    uint32_t queue_depth_max;
    uint32_t thread_count;        /* the number of threads of the threads backend; 0: 4 */
    struct lh_waker *waker;       /* woken after completions; borrowed until destroy; may be NULL */
    const struct lh_clock *clock; /* borrowed until destroy */
};

struct lh_io;

struct lh_io_ops {
    uint32_t version; /* LH_IO_OPS_VERSION */
    const char *name; /* "io_uring", "libaio", "threads" */
    int (*submit)(struct lh_io *io, struct lh_io_request *request); /* 0, or -EAGAIN if full */
    /* (optional) Pass queued requests to the kernel; called once after a batch of submits. */
    void (*flush)(struct lh_io *io);
    uint32_t (*poll)(struct lh_io *io, struct lh_io_request **done, uint32_t done_max);
    void (*destroy)(struct lh_io *io); /* no request may be in flight: asserted */
};

/* Every implementation begins with this struct. */
struct lh_io {
    const struct lh_io_ops *ops;
    uint32_t in_flight_count;
    /* what is unavailable to this backend, and why ("buffers not registered: ...") */
    char note[256];
};

/*
 * Create a backend by name: "io_uring", "libaio" or "threads".
 *
 * Owns:   *io_out owns the ring and its threads; release with (*io_out)->ops->destroy().
 * Errors: -EINVAL (opts, unknown name), -EBADF (a file that is not open), -ENOTSUP (not built in),
 *         -ENOMEM, the kernel's error (-EPERM: forbidden by seccomp or sysctl; the message names
 *         what forbids it and how to allow it). On error *io_out is NULL.
 */
int lh_io_create(const char *name, const struct lh_io_opts *opts, struct lh_alloc *alloc,
                 struct lh_io **io_out, struct lh_error *err) LH_MUST_CHECK;

/*
 * Create the first backend that works, in the order io_uring, libaio, threads. Each is tried with
 * lh_io_probe() in directory (with O_DIRECT if a file of opts is direct). reason_out gets one line
 * per skipped backend, with the reason; "" if none was skipped.
 *
 * Owns, Errors: as lh_io_create(). If no backend works: the code of the last one, and a message
 *         with the reasons of all backends.
 */
int lh_io_create_best(const char *directory, const struct lh_io_opts *opts, struct lh_alloc *alloc,
                      struct lh_io **io_out, char *reason_out, uint64_t reason_bytes,
                      struct lh_error *err) LH_MUST_CHECK;

/*
 * Check whether a backend works in directory: write 4 KiB to an unlinked file, sync it, and read
 * the bytes back. direct: with O_DIRECT. The doctor uses this, too. Errors: as lh_io_create(), or
 * the error of the write, sync or read, or -EIO (wrong bytes were read).
 */
int lh_io_probe(const char *name, const char *directory, bool direct, struct lh_alloc *alloc,
                struct lh_error *err) LH_MUST_CHECK;

/* The names of the backends in this build, best first, NULL-terminated. */
const char *const *lh_io_names(void);

#endif
