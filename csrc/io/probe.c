#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* O_DIRECT, O_TMPFILE */
#endif
#include "io/io.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"

#define PROBE_BYTES LH_BLOCK_BYTES
/* The interval between two polls of a wait. It has no timeout, because a device may be slow. */
#define PROBE_WAIT_MS 100

/* Create a file without a name in directory. Returns its descriptor or -errno. */
static int probe_open(const char *directory, bool direct, struct lh_error *err)
{
    int flags = O_RDWR | O_CLOEXEC | (direct ? O_DIRECT : 0);
    int fd = open(directory, flags | O_TMPFILE, 0600);
    int code = fd < 0 ? -errno : 0;
    if (code == -EOPNOTSUPP || code == -EISDIR) {
        /* The file system does not support files without a name (O_TMPFILE). */
        char path[4096];
        int length = snprintf(path, sizeof(path), "%s/.lohan-probe-%ld", directory, (long)getpid());
        if (length < 0 || (size_t)length >= sizeof(path))
            return lh_error_set(err, -ENAMETOOLONG, "the path %.64s... is too long", directory);
        fd = open(path, flags | O_CREAT | O_EXCL, 0600);
        code = fd < 0 ? -errno : 0;
        /* Some file systems create the file before they refuse O_DIRECT. */
        if (fd >= 0 || code == -EINVAL)
            unlink(path);
    }
    if (fd >= 0)
        return fd;
    if (code == -EINVAL && direct)
        return lh_error_set(err, code,
                            "%s refuses direct I/O (O_DIRECT): put the store on a local disk "
                            "(ext4, xfs)",
                            directory);
    return lh_error_set(err, code, "cannot make a file in %s: %s", directory, strerror(-code));
}

/* Run one request and return its result. */
static int64_t request_await(struct lh_io *io, struct lh_waker *waker,
                             struct lh_io_request *request)
{
    struct lh_io_request *done = NULL;
    int rc = io->ops->submit(io, request);
    LH_ASSERT(rc == 0);
    if (io->ops->flush)
        io->ops->flush(io);
    for (;;) {
        lh_waker_prepare(waker);
        if (io->ops->poll(io, &done, 1) == 1)
            break;
        lh_waker_wait(waker, PROBE_WAIT_MS);
    }
    lh_waker_cancel(waker);
    LH_ASSERT(done == request);
    return request->result;
}

/* A hint at what may forbid the use of a backend that could be created, or "". */
static const char *forbidden_hint(int code)
{
    bool is_forbidden = code == -EPERM || code == -EACCES || code == -ENOSYS;
    return is_forbidden ? ", perhaps because a seccomp filter allows only some of its system calls "
                          "(docker: --security-opt seccomp=unconfined)"
                        : "";
}

/* Write a pattern, sync it, read it back. buffer: 2 * PROBE_BYTES, aligned. */
static int round_trip(struct lh_io *io, struct lh_waker *waker, uint8_t *buffer,
                      struct lh_error *err)
{
    static const enum lh_io_kind kinds[] = {LH_IO_KIND_WRITE, LH_IO_KIND_SYNC, LH_IO_KIND_READ};
    static const char *const kind_names[] = {"read", "write", "fdatasync"};
    LH_ASSERT(lh_is_aligned((uintptr_t)buffer, LH_BLOCK_BYTES));
    for (uint64_t i = 0; i < PROBE_BYTES; i++)
        buffer[i] = (uint8_t)(i * 131 + i / 256);
    for (size_t i = 0; i < LH_COUNT_OF(kinds); i++) {
        struct lh_io_request request = {
            .kind = kinds[i],
            .buffer = kinds[i] == LH_IO_KIND_READ ? buffer + PROBE_BYTES : buffer,
            .bytes = PROBE_BYTES,
        };
        int64_t result = request_await(io, waker, &request);
        if (result < 0)
            return lh_error_set(err, (int)result, "%s of %" PRIu64 " bytes by %s: %s%s",
                                kind_names[kinds[i]], PROBE_BYTES, io->ops->name,
                                strerror((int)-result), forbidden_hint((int)result));
    }
    if (memcmp(buffer, buffer + PROBE_BYTES, PROBE_BYTES) != 0)
        return lh_error_set(err, -EIO, "%s read back other bytes than it wrote", io->ops->name);
    return 0;
}

int lh_io_probe(const char *name, const char *directory, bool direct, struct lh_alloc *alloc,
                struct lh_error *err)
{
    struct lh_clock clock = lh_clock_real();
    struct lh_waker waker;
    struct lh_io *io = NULL;
    /* Allocate one block more, because the allocator aligns only to a cache line. */
    uint8_t *memory = lh_alloc_zeroed(alloc, 2 * PROBE_BYTES + LH_BLOCK_BYTES, 1);
    if (!memory)
        return lh_error_set(err, -ENOMEM, "no memory for a probe of %s", name);
    uint64_t skip_bytes = lh_align_up((uintptr_t)memory, LH_BLOCK_BYTES) - (uintptr_t)memory;
    int rc = lh_waker_init(&waker, err);
    if (rc < 0)
        goto out_free;
    int fd = probe_open(directory, direct, err);
    rc = fd;
    if (rc < 0)
        goto out_waker;
    struct lh_io_file file = {.fd = fd, .direct = direct};
    struct lh_io_opts opts = {
        .files = &file,
        .file_count = 1,
        .queue_depth_max = 1,
        .thread_count = 1,
        .waker = &waker,
        .clock = &clock,
    };
    rc = lh_io_create(name, &opts, alloc, &io, err);
    if (rc == 0) {
        rc = round_trip(io, &waker, memory + skip_bytes, err);
        io->ops->destroy(io);
    }
    close(fd);
out_waker:
    lh_waker_deinit(&waker);
out_free:
    lh_free(alloc, memory);
    return rc;
}
