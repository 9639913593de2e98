#include "io/io.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "io/io_private.h"

struct backend {
    const char *name;
    lh_io_create_fn create; /* NULL: not in this build */
    const char *package;    /* the package that the build looked for */
};

/* The backends in order of preference. */
static const struct backend backends[] = {
#if defined(LH_HAVE_LIBURING)
    {"io_uring", lh_io_uring_create, "liburing"},
#else
    {"io_uring", NULL, "liburing"},
#endif
#if defined(LH_HAVE_LIBAIO)
    {"libaio", lh_io_aio_create, "libaio"},
#else
    {"libaio", NULL, "libaio"},
#endif
    {"threads", lh_io_threads_create, NULL},
};

static const char *const names[] = {
#if defined(LH_HAVE_LIBURING)
    "io_uring",
#endif
#if defined(LH_HAVE_LIBAIO)
    "libaio",
#endif
    "threads",
    NULL,
};

const char *const *lh_io_names(void)
{
    return names;
}

static int buffers_check(const struct lh_io_opts *opts, struct lh_error *err)
{
    if (opts->buffer_count > LH_IO_BUFFER_COUNT_MAX)
        return lh_error_set(err, -EINVAL, "buffer_count %u is above %d", opts->buffer_count,
                            LH_IO_BUFFER_COUNT_MAX);
    for (uint32_t i = 0; i < opts->buffer_count; i++)
        if (!opts->buffers[i].base || opts->buffers[i].bytes == 0)
            return lh_error_set(err, -EINVAL, "buffer %u is empty (%p, %" PRIu64 " bytes)", i,
                                opts->buffers[i].base, opts->buffers[i].bytes);
    return 0;
}

static int opts_check(const struct lh_io_opts *opts, struct lh_error *err)
{
    LH_ASSERT(opts->clock);
    if (opts->queue_depth_max == 0 || opts->queue_depth_max > LH_IO_QUEUE_DEPTH_MAX)
        return lh_error_set(err, -EINVAL, "queue_depth_max %u is not within 1 .. %d",
                            opts->queue_depth_max, LH_IO_QUEUE_DEPTH_MAX);
    if (opts->thread_count > LH_IO_THREAD_COUNT_MAX)
        return lh_error_set(err, -EINVAL, "thread_count %u is above %d", opts->thread_count,
                            LH_IO_THREAD_COUNT_MAX);
    if (opts->file_count == 0 || opts->file_count > LH_IO_FILE_COUNT_MAX)
        return lh_error_set(err, -EINVAL, "file_count %u is not within 1 .. %d", opts->file_count,
                            LH_IO_FILE_COUNT_MAX);
    for (uint32_t i = 0; i < opts->file_count; i++)
        if (opts->files[i].fd != -1 && fcntl(opts->files[i].fd, F_GETFD) < 0)
            return lh_error_set(err, -EBADF, "file %u: descriptor %d is not open", i,
                                opts->files[i].fd);
    return buffers_check(opts, err);
}

int lh_io_create(const char *name, const struct lh_io_opts *opts, struct lh_alloc *alloc,
                 struct lh_io **io_out, struct lh_error *err)
{
    *io_out = NULL;
    LH_TRY(opts_check(opts, err));
    for (size_t i = 0; i < LH_COUNT_OF(backends); i++) {
        if (strcmp(name, backends[i].name) != 0)
            continue;
        if (!backends[i].create)
            return lh_error_set(err, -ENOTSUP,
                                "%s is not in this build: %s was not found; install %s-dev (or "
                                "-devel) and build again",
                                name, backends[i].package, backends[i].package);
        return backends[i].create(opts, alloc, io_out, err);
    }
    return lh_error_set(err, -EINVAL, "unknown I/O backend %s (valid: io_uring, libaio, threads)",
                        name);
}

/* Append the line "name: message" to text. The line is truncated if it does not fit. */
static void reason_add(char *text, uint64_t text_bytes, const char *name, const char *message)
{
    uint64_t used = strlen(text);
    if (used + 1 >= text_bytes)
        return;
    int length =
        snprintf(text + used, text_bytes - used, "%s%s: %s", used > 0 ? "\n" : "", name, message);
    LH_ASSERT(length > 0);
}

int lh_io_create_best(const char *directory, const struct lh_io_opts *opts, struct lh_alloc *alloc,
                      struct lh_io **io_out, char *reason_out, uint64_t reason_bytes,
                      struct lh_error *err)
{
    char reasons[LH_ERROR_MESSAGE_BYTES] = "";
    struct lh_error last = {0};
    bool direct = false;
    int rc = 0;
    *io_out = NULL;
    if (reason_bytes > 0)
        reason_out[0] = '\0';
    LH_TRY(opts_check(opts, err));
    for (uint32_t i = 0; i < opts->file_count; i++)
        direct = direct || opts->files[i].direct;
    for (size_t i = 0; i < LH_COUNT_OF(backends); i++) {
        rc = lh_io_probe(backends[i].name, directory, direct, alloc, &last);
        if (rc == 0)
            rc = lh_io_create(backends[i].name, opts, alloc, io_out, &last);
        if (rc == 0)
            return 0;
        reason_add(reason_out, reason_bytes, backends[i].name, last.message);
        reason_add(reasons, sizeof(reasons), backends[i].name, last.message);
    }
    return lh_error_set(err, rc, "no I/O backend works on %s:\n%s", directory, reasons);
}
